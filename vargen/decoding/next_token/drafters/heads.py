"""What drafters trained on a target's features share: their trees, and the features that passes left.

Shape suffixes: B images, R rows of the target (B times its guidance halves), A slots of an accepted path, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Output, Step
from vargen.decoding.next_token.drafters.base import TreeDrafter
from vargen.decoding.next_token.protocols import HeadedModel, TokenModel
from vargen.decoding.next_token.trees.expand import CHILD_SAMPLING, Drawing, check_vocabulary, validate_child_sampling
from vargen.decoding.next_token.trees.search import TreeController, sizes
from vargen.decoding.next_token.trees.shapes import (
    MAX_TREE_WIDTH,
    AutoTree,
    DynamicTree,
    StaticTree,
    TreeShape,
    chain,
    parse_shape,
)
from vargen.decoding.pass_costs import measure_pass_costs
from vargen.kernels.dispatch import is_eager_cpu
from vargen.values import parse_int, short_repr


@dataclass
class Features:
    """The target's features by which the newest tokens were drawn, `[R, A, D]`, and how many of them each image has, `[B]`."""

    held: Tensor
    count: Tensor

    @classmethod
    def first(cls, output: Output, images: int) -> Features:
        """Behind the prefill, which drew one token."""
        return cls(there(output.features), torch.ones(images, dtype=torch.int64, device=output.logits.device))

    def observe(self, step: Step) -> None:
        """Take those of the tokens that a pass committed. On a CPU as many slots as any image committed, else always the
        longest path: the host does not wait for a device."""
        features = there(step.features)
        path, self.count = step.verdict.path, step.count
        if is_eager_cpu(path):
            path = path[:, : max(int(step.count.max()), 1)]
        self.held = at_slots(features, path)

    def last(self) -> Tensor:
        """That by which each image's newest token was drawn, `[R, 1, D]`."""
        return at_slots(self.held, (self.count - 1).clamp(min=0)[:, None])


def at_slots(rows: Tensor, slots: Tensor) -> Tensor:
    """`[R, n, D]` of features or logits `[R, A, D]` at slots `[B, n]`, for all guidance halves."""
    index = slots.repeat(len(rows) // len(slots), 1)[..., None]
    return rows.gather(1, index.expand(-1, -1, rows.shape[2]))


def there(features: Tensor | None) -> Tensor:
    """The features of a pass.

    Raises:
        ValueError: if it returned none.
    """
    if features is None:
        raise ValueError("a trained drafter needs the model's features, and its passes return none")
    return features


@dataclass(frozen=True)
class HeadDrafter(TreeDrafter):
    """Trees from a drafter that was trained on the target's features.

    Args:
        shape: a number, for a chain of so many drafts; a `DynamicTree`; or a `StaticTree`, also by name or by its parents;
            `"auto"` or an `AutoTree` chooses static trees by measured costs and recent acceptance, and drafts nothing where
            that does not pay.
        drawing: how the children of a slot are chosen: `"sampled"`, without replacement; `"independent"`, with replacement, in
            static trees; `"best"`, the most probable; `"coupled"`, with the image's own noise, for the rule `shared_noise`.
        model: the trained drafter. None: the target's own, as a pipeline has it behind `load_drafter`.

    Raises:
        ValueError: for an unknown tree or drawing, or a chain of less than one draft; by `bind` for a tree that the grid does
            not hold or with more children than there are tokens, if there is no trained drafter, or one of another
            vocabulary or grid.
        TypeError: for a shape that is none, or a model that is none.
    """

    shape: TreeShape | AutoTree | str | int | tuple[int, ...] = field(default_factory=DynamicTree)
    drawing: Drawing = "sampled"
    model: Any = None
    topology: str = field(default="tree", init=False)

    kind: ClassVar[str]  # of the trained drafter: what the target calls it
    protocol: ClassVar[type]

    def __post_init__(self) -> None:
        shape = self.shape
        if not isinstance(shape, StaticTree | DynamicTree | AutoTree | str | list | tuple):
            length = parse_int(shape, 1, MAX_TREE_WIDTH - 1)
            if length is None:
                error = ValueError if isinstance(shape, int | float) else TypeError
                allowed = f"a whole number from 1 to {MAX_TREE_WIDTH - 1} for a chain, a tree, its name or its parents"
                raise error(f"shape must be {allowed}, got {short_repr(shape)}")
            shape = chain(length)
        tree = parse_shape(shape)
        object.__setattr__(self, "shape", tree)
        validate_child_sampling(self.drawing, tree)
        straight = isinstance(tree, StaticTree) and tree.slots == chain(tree.nodes)
        object.__setattr__(self, "topology", "chain" if straight else "tree")
        if self.model is not None and (isinstance(self.model, type) or not isinstance(self.model, self.protocol)):
            example = f"such as pipe.token_model(1.0).{self.kind}"
            raise TypeError(f"model must be a {self.protocol.__name__}, {example}, or None, got {short_repr(self.model)}")

    @property
    def tree(self) -> TreeShape | AutoTree:
        assert isinstance(self.shape, StaticTree | DynamicTree | AutoTree)
        return self.shape

    @property
    def offers(self) -> tuple[str, ...]:
        """See `OfferingDrafter`."""
        return CHILD_SAMPLING[self.drawing]

    def trained(self, model: TokenModel) -> Any:
        """The trained drafter that drafts for `model`.

        Raises:
            ValueError: if there is none, or it has another vocabulary or grid.
        """
        found = self.model
        if found is None and isinstance(model, HeadedModel):
            found = getattr(model, self.kind)
        if found is None:
            raise ValueError(self.missing())
        if (found.vocab, found.grid) != (model.vocab, model.grid):
            raise ValueError(
                f"the {self.kind} drafter must share the target's vocabulary and grid, {model.vocab} tokens on {model.grid}, "
                f"got {found.vocab} on {found.grid}"
            )
        return found

    def missing(self) -> str:
        """What to say where there is none."""
        return (
            f"this method needs a drafter trained for the model ({self.kind}), and this pipeline has none: train one with "
            f"`vargen train drafter {self.kind}`, then pipe.load_drafter(folder)"
        )

    def bind(self, model: TokenModel) -> Self:
        """This drafter; an automatic tree is cut to the grid."""
        self.trained(model)
        check_vocabulary(self.tree, model.vocab)
        tokens = model.grid[0] * model.grid[1]
        self.check_grid(tokens)
        return self.fitted(tokens)

    def choice(
        self, model: TokenModel, condition: Any, images: int, kept_up: float, drafting: Callable[[tuple[int, ...]], float]
    ) -> TreeController | None:
        """Of the tree of each pass, where it is chosen.

        Args:
            kept_up: seconds of a pass that the drafter takes whether or not it drafts.
            drafting: seconds of the rest, by the parents of the tree.
        """
        if not isinstance(self.tree, AutoTree):
            return None
        seconds = {fed: cost + kept_up for fed, cost in measure_pass_costs(model, condition, images, sizes(self.tree)).items()}
        return TreeController(self.tree, seconds, drafting, settled=model.device.type != "cpu")

    def chosen(self, choice: TreeController | None) -> TreeShape | None:
        """The tree of the next pass; None where drafting does not pay."""
        if choice is None:
            assert not isinstance(self.tree, AutoTree)
            return self.tree
        parents = choice.next()
        return None if len(parents) == 1 else StaticTree(parents)

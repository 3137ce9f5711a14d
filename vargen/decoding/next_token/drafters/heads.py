"""Common base of drafters trained on the target's features: tree shapes, and the features of recent passes.

Shape suffixes: B images, R rows of the target (B, times two with CFG), A slots of an accepted path, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Output, Step
from vargen.decoding.next_token.drafters.base import TreeDrafter
from vargen.decoding.next_token.protocols import TokenModel
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
    """The target features that predicted the newest tokens, `[R, A, D]`, and the number of new tokens of each image, `[B]`."""

    held: Tensor
    count: Tensor

    @classmethod
    def first(cls, output: Output, images: int) -> Features:
        """Features after the prefill, from which one token was sampled."""
        return cls(there(output.features), torch.ones(images, dtype=torch.int64, device=output.logits.device))

    def observe(self, step: Step) -> None:
        """Take the features of the tokens that a pass committed.

        On a CPU the number of slots is the largest number of tokens that any image committed. On other devices it is always the
        longest path, so that the host does not wait for the device.
        """
        features = there(step.features)
        path, self.count = step.verdict.path, step.count
        if is_eager_cpu(path):
            path = path[:, : max(int(step.count.max()), 1)]
        self.held = at_slots(features, path)

    def last(self) -> Tensor:
        """The feature that predicted the newest token of each image, `[R, 1, D]`."""
        return at_slots(self.held, (self.count - 1).clamp(min=0)[:, None])


def at_slots(rows: Tensor, slots: Tensor) -> Tensor:
    """Gather features or logits `[R, A, D]` at slots `[B, n]` for all CFG rows: `[R, n, D]`."""
    index = slots.repeat(len(rows) // len(slots), 1)[..., None]
    return rows.gather(1, index.expand(-1, -1, rows.shape[2]))


def there(features: Tensor | None) -> Tensor:
    """Return the features of a pass.

    Raises:
        ValueError: if the pass returned none.
    """
    if features is None:
        raise ValueError("a trained drafter needs the model's features, and its passes return none")
    return features


@dataclass(frozen=True)
class HeadDrafter(TreeDrafter):
    """Draft trees with a draft head trained on the target's features.

    Args:
        shape: an integer, for a chain of that many draft tokens; a `DynamicTree`; or a `StaticTree`, also given by name or by
            its parents. `"auto"` or an `AutoTree` selects among static trees by measured costs and recent acceptance, and
            drafts nothing if drafting does not pay off.
        drawing: how the children of a slot are selected: `"sampled"` without replacement; `"independent"`, sampled with
            replacement, for static trees; `"best"`, the most probable; `"coupled"`, with the shared noise, for the rule
            `shared_noise`.
        model: the draft head. None: that of the target, which a pipeline has after `load_drafter`.

    Raises:
        ValueError: if the tree or `drawing` is unknown, or a chain has no draft token. `bind` raises it if the tree does not
            fit the grid, a slot has more children than there are tokens, or the draft head is missing or has another vocabulary
            or grid.
        TypeError: if the shape or the model has the wrong type.
    """

    shape: TreeShape | AutoTree | str | int | tuple[int, ...] = field(default_factory=DynamicTree)
    drawing: Drawing = "sampled"
    model: Any = None
    topology: str = field(default="tree", init=False)

    kind: ClassVar[str]  # name of the draft head in `TokenModel.draft_heads`
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
            example = f"such as pipe.decoding_model(1.0).draft_heads[{self.kind!r}]"
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
        """Return the draft head for `model`.

        Raises:
            ValueError: if there is none, or its vocabulary or grid differs.
        """
        found = self.model or getattr(model, "draft_heads", {}).get(self.kind)
        if found is None:
            raise ValueError(self.missing())
        if (found.vocab, found.grid) != (model.vocab, model.grid):
            raise ValueError(
                f"the {self.kind} drafter must share the target's vocabulary and grid, {model.vocab} tokens on {model.grid}, "
                f"got {found.vocab} on {found.grid}"
            )
        return found

    def missing(self) -> str:
        """Error message for a model without a draft head."""
        return (
            f"this method needs a drafter trained for the model ({self.kind}), and this pipeline has none: train one with "
            f"`vargen train drafter {self.kind}`, then pipe.load_drafter(folder)"
        )

    def bind(self, model: TokenModel) -> Self:
        """Return this drafter; an automatic tree is limited to the grid."""
        self.trained(model)
        check_vocabulary(self.tree, model.vocab)
        tokens = model.grid[0] * model.grid[1]
        self.check_grid(tokens)
        return self.fitted(tokens)

    def choice(
        self, model: TokenModel, condition: Any, images: int, kept_up: float, drafting: Callable[[tuple[int, ...]], float]
    ) -> TreeController | None:
        """Return the controller that selects the tree of each pass; None if the tree is fixed.

        Args:
            kept_up: seconds that the draft head spends on every pass, whether or not it drafts.
            drafting: further seconds to draft a tree, as a function of its parents.
        """
        if not isinstance(self.tree, AutoTree):
            return None
        seconds = {fed: cost + kept_up for fed, cost in measure_pass_costs(model, condition, images, sizes(self.tree)).items()}
        return TreeController(self.tree, seconds, drafting, settled=model.device.type != "cpu")

    def chosen(self, choice: TreeController | None) -> TreeShape | None:
        """Return the tree of the next pass; None if drafting does not pay off."""
        if choice is None:
            assert not isinstance(self.tree, AutoTree)
            return self.tree
        parents = choice.next()
        return None if len(parents) == 1 else StaticTree(parents)

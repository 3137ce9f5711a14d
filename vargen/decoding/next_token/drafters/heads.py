"""Common base of drafters trained on the target's features: tree shapes, and the features of recent passes.

Shape suffixes: B images, R rows of the target (B, times two with CFG), A slots of an accepted path, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import DraftHead, TokenModel
from vargen.decoding.next_token.drafters.base import TreeDrafter
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.next_token.trees.children import CHILD_SAMPLING, ChildSampling, validate_child_sampling
from vargen.decoding.next_token.trees.shapes import (
    MAX_TREE_WIDTH,
    DynamicTree,
    StaticTree,
    TreeShape,
    make_chain,
    parse_shape,
)
from vargen.decoding.tree import Output, Step
from vargen.kernels.dispatch import is_eager_cpu
from vargen.values import parse_int, short_repr


@register_state
@dataclass
class FeatureBuffer:
    """The target features that predicted the newest tokens, `[R, A, D]`, and the number of new tokens of each image, `[B]`."""

    rows: Tensor
    count: Tensor

    @classmethod
    def from_prefill(cls, output: Output, images: int) -> FeatureBuffer:
        """Features after the prefill, from which one token was sampled."""
        return cls(require_features(output.features), torch.ones(images, dtype=torch.int64, device=output.logits.device))

    def observe(self, step: Step) -> FeatureBuffer:
        """Return the features of the tokens that a pass committed.

        On a CPU the number of slots is the largest number of tokens that any image committed. On other devices it is always the
        longest path, so that the host does not wait for the device.
        """
        path = step.verdict.path
        if is_eager_cpu(path):
            path = path[:, : max(int(step.count.max()), 1)]
        return FeatureBuffer(gather_slots(require_features(step.features), path), step.count)

    def gather_last(self) -> Tensor:
        """The feature that predicted the newest token of each image, `[R, 1, D]`."""
        return gather_slots(self.rows, (self.count - 1).clamp(min=0)[:, None])


def gather_slots(rows: Tensor, slots: Tensor) -> Tensor:
    """Gather features or logits `[R, A, D]` at slots `[B, n]` for all CFG rows: `[R, n, D]`."""
    index = slots.repeat(len(rows) // len(slots), 1)[..., None]
    return rows.gather(1, index.expand(-1, -1, rows.shape[2]))


def require_features(features: Tensor | None) -> Tensor:
    """Return the features of a pass."""
    if features is None:
        raise ValueError("draft heads need the model's features, and its passes return none")
    return features


@dataclass(frozen=True)
class HeadDrafter(TreeDrafter):
    """Draft trees with a draft head trained on the target's features.

    Args:
        shape: an integer, for a chain of that many draft tokens; a `DynamicTree`; or a `StaticTree`, also given by name or by
            its parents.
        child_sampling: how the children of a slot are selected: sampled `"without-replacement"`, or `"with-replacement"` (for
            static trees); `"top-k"`, the most probable; `"shared-noise"`, for the rule `shared_noise`.
        model: the draft head. None: that of the target, which a pipeline has after `load_drafter`.
    """

    shape: TreeShape | str | int | tuple[int, ...] = field(default_factory=DynamicTree)
    child_sampling: ChildSampling = "without-replacement"
    model: Any = None
    topology: str = field(default="tree", init=False)

    kind: ClassVar[str]  # name of the draft head in `TokenModel.draft_heads`
    head_class: ClassVar[type[DraftHead]]

    def __post_init__(self) -> None:
        shape = self.shape
        if not isinstance(shape, StaticTree | DynamicTree | str | list | tuple):
            length = parse_int(shape, 1, MAX_TREE_WIDTH - 1)
            if length is None:
                error = ValueError if isinstance(shape, int | float) else TypeError
                allowed = f"a whole number from 1 to {MAX_TREE_WIDTH - 1} for a chain, a tree, its name or its parents"
                raise error(f"shape must be {allowed}, got {short_repr(shape)}")
            shape = make_chain(length)
        tree = parse_shape(shape)
        object.__setattr__(self, "shape", tree)
        validate_child_sampling(self.child_sampling, tree)
        is_chain = isinstance(tree, StaticTree) and tree.parents_tuple == make_chain(tree.nodes)
        object.__setattr__(self, "topology", "chain" if is_chain else "tree")
        if self.model is not None and not isinstance(self.model, self.head_class):
            example = f"such as pipe.decoding_model(1.0).draft_heads[{self.kind!r}]"
            raise TypeError(f"model must be a {self.head_class.__name__}, {example}, or None, got {short_repr(self.model)}")

    @property
    def provides(self) -> tuple[str, ...]:
        return CHILD_SAMPLING[self.child_sampling]

    def find_head(self, model: TokenModel) -> Any:
        """Return the draft head for `model`."""
        found = self.model or model.draft_heads.get(self.kind)
        if found is None:
            raise ValueError(self.missing_head_message())
        if (found.vocab, found.grid) != (model.vocab, model.grid):
            raise ValueError(
                f"the {self.kind} drafter must share the target's vocabulary and grid, {model.vocab} tokens on {model.grid}, "
                f"got {found.vocab} on {found.grid}"
            )
        return found

    def missing_head_message(self) -> str:
        """Error message for a model without a draft head."""
        return (
            f"this method needs a drafter trained for the model ({self.kind}), and this pipeline has none: train one with "
            f"`vargen train drafter {self.kind}`, then pipe.load_drafter(folder)"
        )

    def bind(self, model: TokenModel) -> Self:
        head, bound = self.find_head(model), replace(super().bind(model))
        object.__setattr__(bound, "model", head)
        return bound

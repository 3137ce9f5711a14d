"""Speculative drafting of trees: a smaller model with the same vocabulary grows a tree, which the target verifies.

Shape suffixes: B images, F slots of one level, E slots expanded so far, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.drafters.base import TreeDrafter
from vargen.decoding.next_token.drafters.draft_model import Speculative
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.next_token.trees.children import CHILD_SAMPLING, ChildSampling, validate_child_sampling
from vargen.decoding.next_token.trees.expand import Frontier, grow_tree
from vargen.decoding.next_token.trees.shapes import DynamicTree, TreeShape
from vargen.decoding.noise import Noise
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.tree import Draft, Output, Tree


@register_state
@dataclass
class DraftTreeState:
    """State of B images."""

    cache: Any
    sampling: Sampling
    num_tokens: int


@dataclass(frozen=True)
class SpeculativeTree(TreeDrafter):
    """Draft a tree with a smaller model, one of its passes per level.

    Args:
        shape: a `DynamicTree`, or a `StaticTree`, also given by name or by its parents.
        child_sampling: how the children of a slot are selected: sampled `"without-replacement"`, or `"with-replacement"` (for
            static trees); `"top-k"`, the most probable; `"shared-noise"`, for the rule `shared_noise`.
        model: the draft model. None: `draft_model` of the target.

    Raises:
        ValueError: if the tree or `child_sampling` is unknown. `bind` raises it if the tree does not fit the grid, a slot has
            more children than there are tokens, or the draft model is missing or has another vocabulary or grid.
        TypeError: if the shape or the model has the wrong type.
    """

    shape: TreeShape | str | tuple[int, ...] = field(default_factory=DynamicTree)
    child_sampling: ChildSampling = "without-replacement"
    model: TokenModel | None = None

    def __post_init__(self) -> None:
        validate_child_sampling(self.child_sampling, self.tree_shape)
        Speculative(model=self.model)

    @property
    def provides(self) -> tuple[str, ...]:
        return CHILD_SAMPLING[self.child_sampling]

    def require_draft_model(self, model: TokenModel) -> TokenModel:
        """Return the draft model for `model`; see `Speculative.require_draft_model`."""
        return Speculative(1, self.model).require_draft_model(model)

    def bind(self, model: TokenModel) -> Self:
        draft_model, bound = self.require_draft_model(model), replace(super().bind(model))
        object.__setattr__(bound, "model", draft_model)
        return bound

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> DraftTreeState:
        draft_model, shape = self.require_draft_model(model), self.tree_shape
        cache, _ = draft_model.prefill(condition, max(shape.depth + 2, shape.num_expanded))
        return DraftTreeState(cache, sampling, model.grid[0] * model.grid[1])

    def propose(self, state: DraftTreeState, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        """Grow the tree level by level.

        The draft model does not cache draft tokens: each level feeds the root and all expanded slots again. The first level
        also feeds the tokens committed since the last draft.
        """
        model, cache = self.model, state.cache
        assert model is not None

        def expand(frontier: Frontier) -> Tensor:
            if frontier.depth:
                logits = model.forward(frontier.expanded_tokens, cache, frontier.tree).logits[:, -frontier.tokens.shape[1] :]
            else:
                logits = self._catch_up(model, cache, tokens, length)
            return to_probs(logits, state.sampling)

        root = tokens.gather(1, length[:, None] - 1)[:, 0]
        return grow_tree(expand, self.tree_shape, self.child_sampling, root, noise, state.num_tokens)

    def _catch_up(self, model: TokenModel, cache: Any, tokens: Tensor, length: Tensor) -> Tensor:
        """Feed the newest committed tokens, after which everything before the root is in the cache.

        Returns the logits after the root, `[B, 1, V]`. A pass commits at most depth + 1 tokens.
        """
        W = self.tree_shape.depth + 2
        start = (length - W).clamp(min=0)
        last, slots = Tree.make_chain(W - 1, tokens.device), torch.arange(W, device=tokens.device)
        model.rollback(cache, start)
        logits = model.forward(tokens.gather(1, start[:, None] + slots), cache, last).logits
        root = length - 1 - start
        model.commit(cache, slots.expand(len(tokens), W), root, last)
        return logits.gather(1, root[:, None, None].expand(-1, 1, logits.shape[-1]))

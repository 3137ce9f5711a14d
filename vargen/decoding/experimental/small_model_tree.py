"""Trees of a small model with the same vocabulary, which the target verifies.

Shape suffixes: B slots, W newest tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.noise import Noise
from vargen.decoding.speculative import Speculative, require_draft_model
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, Tree
from vargen.decoding.tree_drafters import DynamicTree, Frontier, TreeDrafter
from vargen.values import short_repr


@dataclass(frozen=True)
class SpeculativeTree(TreeDrafter):
    """Draft a tree with a smaller model, one of its passes per level.

    Args:
        shape: of the trees.
        model: the draft model. None: `draft_model` of the target.

    Raises:
        TypeError: if the shape or the model has the wrong type.
        ValueError: `bind` raises it if the tree does not fit the grid, a slot has more children than there are tokens, or the
            draft model is missing or has another vocabulary or grid.
    """

    shape: DynamicTree = field(default_factory=DynamicTree)
    model: TokenModel | None = None

    cache: Any = field(init=False, repr=False, compare=False)
    newest: Tree = field(init=False, repr=False, compare=False)
    rates: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.shape, DynamicTree):
            raise TypeError(f"shape must be a DynamicTree, got {short_repr(self.shape)}")
        Speculative(model=self.model)

    def bind(self, model: TokenModel, slots: int) -> Self:
        small = require_draft_model(self.model or model.draft_model, model)
        newest = Tree.make_chain(self.shape.depth + 1, model.device)
        return super().bind(model, slots).copy(model=small, cache=None, newest=newest)

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        assert self.model is not None
        if self.cache is None:
            width = max(self.shape.depth + 2, self.shape.num_expanded)
            self.keep(cache=self.model.allocate(condition, width, len(state.seeds)))
        self.model.prefill(condition, self.cache, rows)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        """Grow the tree level by level.

        The draft model does not cache draft tokens: each level feeds the root and all expanded slots again. The first level
        also feeds the tokens committed since the last draft.
        """

        def expand(frontier: Frontier) -> Tensor:
            if not frontier.depth:
                return state.sampling.probs(self._catch_up(state))
            assert self.model is not None
            logits = self.model.forward(frontier.expanded_tokens, self.cache, frontier.tree).logits
            return state.sampling.probs(logits[:, -frontier.tokens.shape[1] :])

        return self.grow(expand, state, noise)

    def _catch_up(self, state: TokenState) -> Tensor:
        """Feed the newest committed tokens, after which everything before the root is in the cache.

        Returns the logits after the root, `[B, 1, V]`. A pass commits at most depth + 1 tokens.
        """
        assert self.model is not None
        W, length = self.shape.depth + 2, state.length
        slots, start = torch.arange(W, device=length.device), (length - W).clamp(min=0)
        self.model.rollback(self.cache, start)
        logits = self.model.forward(state.tokens.gather(1, start[:, None] + slots), self.cache, self.newest).logits
        root = length - 1 - start
        self.model.commit(self.cache, slots.expand(len(length), W), root, self.newest)
        return logits.gather(1, root[:, None, None].expand(-1, 1, logits.shape[-1]))

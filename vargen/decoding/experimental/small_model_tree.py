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
from vargen.decoding.speculative import require_draft_model
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, Tree
from vargen.decoding.tree_drafters import DynamicTree, Frontier, TreeDrafter


@dataclass(frozen=True)
class SpeculativeTree(TreeDrafter):
    """Draft a tree with a smaller model, one of its passes per level.

    Args:
        shape: of the trees.
        model: the draft model. None: `draft_model` of the target.

    Raises:
        ValueError: `bind` raises it if the draft model is missing or has another vocabulary or grid.
    """

    shape: DynamicTree = field(default_factory=DynamicTree)
    model: Any = None

    cache: Any = field(init=False, repr=False, compare=False)
    newest: Tree = field(init=False, repr=False, compare=False)

    def bind(self, model: TokenModel, slots: int) -> Self:
        small = require_draft_model(self.model or model.draft_model, model).bind(slots)
        bound = super().bind(model, slots)
        newest = Tree.make_chain(bound.shape.depth + 1, model.device)
        return bound.copy(model=small, cache=None, newest=newest)

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        if self.cache is None:
            width = max(self.shape.depth + 2, self.shape.num_expanded)
            self.keep(cache=self.model.allocate(condition, width, len(state.seeds)))
        self.model.prefill(condition, self.cache, rows)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        def expand(frontier: Frontier) -> Tensor:
            return self.predict(state, frontier.expanded_tokens, frontier.tree, frontier.tokens.shape[1])

        return self.grow(expand, state, noise)

    def predict(self, state: TokenState, tokens: Tensor, tree: Tree, count: int) -> Tensor:
        """Return the probabilities float32 `[B, F, V]` after the last `count` F of E `tokens`, the root and draft tokens.

        The draft model does not cache draft tokens: each level feeds the root and all expanded slots again. The first level
        feeds the tokens that were committed since the last draft instead, the root among them.
        """
        if tokens.shape[1] == 1:
            return state.sampling.probs(self._catch_up(state))
        return state.sampling.probs(self.model.forward(tokens, self.cache, tree).logits[:, -count:])

    def _catch_up(self, state: TokenState) -> Tensor:
        """Feed the newest committed tokens, after which everything before the root is in the cache.

        Returns the logits after the root, `[B, 1, V]`. A pass commits at most depth + 1 tokens.
        """
        W, length = self.shape.depth + 2, state.length
        slots, start = torch.arange(W, device=length.device), (length - W).clamp(min=0)
        self.model.rollback(self.cache, start)
        logits = self.model.forward(state.tokens.gather(1, start[:, None] + slots), self.cache, self.newest).logits
        root = length - 1 - start
        self.model.commit(self.cache, slots.expand(len(length), W), root, self.newest)
        return logits.gather(1, root[:, None, None].expand(-1, 1, logits.shape[-1]))

"""Token recycling: draft from what the target predicted earlier after the same token (Luo et al. 2024, arXiv:2408.08696).

Shape suffixes: B slots, T tokens fed in one pass, K candidates kept, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.speculative import ChainDrafter
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, PassResult, Tree
from vargen.values import number_field, validate_fields


@dataclass(frozen=True)
class Recycle(ChainDrafter):
    """Draft from the target's latest distribution after the same token.

    Every pass predicts what follows each fed token, including rejected draft tokens. The `top_k` most probable candidates are
    kept per token, within the image. When the token occurs again, a draft token is sampled from them, and another one after
    that. The paper takes the most probable candidates and builds a tree; sampling with recorded probabilities is accepted more
    often where no token is likely, as in images. There is no draft after a token that has not occurred in the image.

    Args:
        length: draft tokens per pass, at least 1.
        top_k: candidates kept per token, at least 1.

    Raises:
        ValueError: if a value is out of range. `bind` raises it if the chain does not fit the grid.
    """

    length: int = number_field(3, 1, is_integer=True)
    top_k: int = number_field(64, 1, is_integer=True)

    # Buffers: candidates int64 and weights float32, both [B, V, K]; weights are 0 for tokens that did not occur.
    candidates: Tensor = field(init=False, repr=False, compare=False)
    weights: Tensor = field(init=False, repr=False, compare=False)
    chain: Tree = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validate_fields(self)

    def bind(self, model: TokenModel, slots: int) -> Self:
        shape = slots, model.vocab, min(self.top_k, model.vocab)
        candidates = torch.zeros(shape, dtype=torch.int64, device=model.device)
        weights = torch.zeros(shape, dtype=torch.float32, device=model.device)
        return super().bind(model, slots).copy(candidates=candidates, weights=weights)

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        self.weights[rows] = 0

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        B, device = len(state.length), state.length.device
        image = torch.arange(B, device=device)
        token = state.tokens.gather(1, state.length[:, None] - 1)[:, 0]
        known = torch.ones_like(state.length, dtype=torch.bool)
        drafted, probs, valid = [], [], []
        for slot in range(self.length):
            weights = self.weights[image, token]  # [B, K]
            known = known & (weights.sum(1) > 0) & (state.length + slot < state.num_tokens)
            q = torch.zeros(B, state.vocab, dtype=torch.float32, device=device)
            q.scatter_add_(1, self.candidates[image, token], weights)
            token = torch.where(known, noise.shift(slot).sample(q[:, None], Purpose.DRAFT)[:, 0], 0)
            drafted.append(token)
            probs.append(q)
            valid.append(known)
        return Draft(torch.stack(drafted, 1), self.chain, torch.stack(probs, 1), torch.stack(valid, 1))

    def observe(self, state: TokenState, result: PassResult) -> None:
        """Keep the target's most probable tokens after each fed token.

        If a token was fed twice, the slot nearer to the root counts.
        """
        fed = torch.cat([state.tokens.gather(1, result.noise.position[:, :1] - 1), result.draft.tokens], 1)
        image = torch.arange(len(fed), device=fed.device)
        weights, candidates = result.probs.topk(self.weights.shape[2], dim=2)
        weights = weights / weights.sum(2, keepdim=True)
        seen = result.noise.position < state.num_tokens
        if result.draft.valid is not None:
            seen = seen & torch.nn.functional.pad(result.draft.valid, (1, 0), value=True)
        for slot in reversed(range(fed.shape[1])):
            token, own = fed[:, slot], seen[:, slot, None]
            self.weights[image, token] = torch.where(own, weights[:, slot], self.weights[image, token])
            self.candidates[image, token] = torch.where(own, candidates[:, slot], self.candidates[image, token])

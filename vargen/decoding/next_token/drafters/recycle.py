"""Token recycling: draft from what the target predicted earlier after the same token.

Shape suffixes: B images, T tokens fed in one pass, K candidates kept, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.drafters.base import ChainDrafter
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import Sampling
from vargen.decoding.tree import Draft, Output, Step, Tree
from vargen.values import number_field, validate_fields


@register_state
@dataclass
class RecycleState:
    """State of B images.

    `candidates` int64 and `weights` float32, both `[B, V, K]`: the most probable tokens that the target last predicted after
    each token, with weights of 0 for tokens not seen yet.
    """

    num_tokens: int
    candidates: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Recycle(ChainDrafter):
    """Draft from the target's latest distribution after the same token (Luo et al. 2024, token recycling).

    Every pass predicts what follows each fed token, including rejected draft tokens. The `top_k` most probable candidates are
    stored per token, within the image. When the token occurs again, a draft token is sampled from them, and another one after
    that. The paper takes the most probable candidates and builds a tree; sampling with recorded probabilities is accepted more
    often where no token is likely, as in images. There is no draft after a token that has not occurred in the image.

    Args:
        length: draft tokens per pass, at least 1.
        top_k: candidates stored per token, at least 1.

    Raises:
        ValueError: if a value is out of range. `bind` raises it if the chain does not fit the grid.
    """

    length: int = number_field(3, 1, is_integer=True)
    top_k: int = number_field(64, 1, is_integer=True)

    def __post_init__(self) -> None:
        validate_fields(self)

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> RecycleState:
        rows, columns = model.grid
        shape = (len(seeds), model.vocab, min(self.top_k, model.vocab))
        candidates = torch.zeros(shape, dtype=torch.int64, device=seeds.device)
        return RecycleState(rows * columns, candidates, torch.zeros(shape, dtype=torch.float32, device=seeds.device))

    def propose(self, state: RecycleState, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        image = torch.arange(len(tokens), device=tokens.device)
        fed, probs = [tokens.gather(1, length[:, None] - 1)[:, 0]], []
        known = torch.ones_like(length, dtype=torch.bool)
        valid = []
        for slot in range(self.length):
            weights = state.weights[image, fed[-1]]  # [B, K]
            known = known & (weights.sum(1) > 0) & (length + slot < state.num_tokens)
            q = torch.zeros(len(tokens), state.weights.shape[1], dtype=torch.float32, device=tokens.device)
            q.scatter_add_(1, state.candidates[image, fed[-1]], weights)
            fed.append(torch.where(known, noise.shift(slot).sample(q[:, None], Purpose.DRAFT)[:, 0], 0))
            probs.append(q)
            valid.append(known)
        chain = Tree.make_chain(self.length, tokens.device)
        return Draft(torch.stack(fed[1:], 1), chain, torch.stack(probs, 1), torch.stack(valid, 1))

    def observe(self, state: RecycleState, step: Step) -> RecycleState:
        """Store the target's most probable tokens after each fed token.

        If a token was fed twice, the slot nearer to the root counts.
        """
        fed = torch.cat([step.tokens.gather(1, step.noise.position[:, :1] - 1), step.draft.tokens], 1)
        image = torch.arange(len(fed), device=fed.device)
        weights, candidates = step.probs.topk(state.weights.shape[2], dim=2)
        weights = weights / weights.sum(2, keepdim=True)
        seen = step.noise.position < state.num_tokens
        if step.draft.valid is not None:
            seen = seen & torch.nn.functional.pad(step.draft.valid, (1, 0), value=True)
        for slot in reversed(range(fed.shape[1])):
            token, own = fed[:, slot], seen[:, slot, None]
            state.weights[image, token] = torch.where(own, weights[:, slot], state.weights[image, token])
            state.candidates[image, token] = torch.where(own, candidates[:, slot], state.candidates[image, token])
        return state

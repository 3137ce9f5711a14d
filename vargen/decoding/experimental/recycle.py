"""Token recycling: draft from what the target predicted earlier after the same token (Luo et al. 2024, arXiv:2408.08696).

Shape suffixes: B slots, T tokens fed in one pass, K candidates kept, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.noise import Noise
from vargen.decoding.speculative import ChainDrafter
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, PassResult
from vargen.values import number_field


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
    """

    length: int = number_field(3, 1, is_integer=True)
    top_k: int = number_field(64, 1, is_integer=True)

    # Buffers: candidates int64 and weights float32, both [B, V, K]; weights are 0 for tokens that did not occur.
    candidates: Tensor = field(init=False, repr=False, compare=False)
    weights: Tensor = field(init=False, repr=False, compare=False)

    def bind(self, model: TokenModel, slots: int) -> Self:
        shape = slots, model.vocab, min(self.top_k, model.vocab)
        candidates = torch.zeros(shape, dtype=torch.int64, device=model.device)
        weights = torch.zeros(shape, dtype=torch.float32, device=model.device)
        return super().bind(model, slots).copy(candidates=candidates, weights=weights)

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        self.weights[rows] = 0

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        image = torch.arange(len(state.length), device=state.length.device)

        def predict(tokens: Tensor, position: Tensor) -> Tensor:
            last = tokens.gather(1, position - 1)[:, 0]
            q = torch.zeros(len(last), state.vocab, dtype=torch.float32, device=last.device)
            return q.scatter_add_(1, self.candidates[image, last], self.weights[image, last])

        return self.sample_chain(predict, state, noise)

    def observe(self, state: TokenState, result: PassResult) -> None:
        """Keep the target's most probable tokens after each fed token.

        If a token was fed twice, the slot nearer to the root counts.
        """
        draft: Any = result.draft
        fed = torch.cat([state.tokens.gather(1, result.noise.position[:, :1] - 1), draft.tokens], 1)
        seen = pad(draft.valid, (1, 0), value=True) & (result.noise.position < state.num_tokens)
        image = torch.arange(len(fed), device=fed.device)
        weights, candidates = result.probs.topk(self.weights.shape[2], dim=2)
        weights = weights / weights.sum(2, keepdim=True)
        for slot in reversed(range(fed.shape[1])):
            token, own = fed[:, slot], seen[:, slot, None]
            self.weights[image, token] = torch.where(own, weights[:, slot], self.weights[image, token])
            self.candidates[image, token] = torch.where(own, candidates[:, slot], self.candidates[image, token])

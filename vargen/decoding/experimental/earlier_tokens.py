"""Drafts without a network, from earlier tokens of the image: lookup, and token recycling.

Shape suffixes: B slots, N tokens of the grid, T tokens fed in one pass, S positions, K candidates kept, V vocabulary.
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

_OFFSETS = ((0, -1), (-1, 0), (-1, 1), (0, -2))  # (row, column) of the most informative neighbors, in order


@dataclass(frozen=True)
class Lookup(ChainDrafter):
    """Draft what followed the same context earlier in the image (Saxena 2023, prompt lookup, in two dimensions).

    Prompt lookup copies what followed the last occurrence of the same words. In an image, a token depends on the one above as
    much as on the one before. The context therefore consists of the tokens to the left, above, above right, and second to the
    left, as many of them as have occurred together. Tokens are not copied: those that followed the context are counted, and a
    draft token is sampled from the counts, which are recorded as q. The next draft token is looked up after it.

    Args:
        length: draft tokens per pass, at least 1.
        sharpness: counts are raised to the power sharpness / temperature, above 0; guidance makes the target sharper.
    """

    length: int = number_field(3, 1, is_integer=True)
    sharpness: float = number_field(2.0, 0, open_below=True)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        power = self.sharpness / state.sampling.temperature[:, :, 0]

        def predict(tokens: Tensor, position: Tensor) -> Tensor:
            counts = count_continuations(tokens, position, state.vocab, state.columns)
            weights = (counts / counts.amax(1, keepdim=True).clamp_min(1e-30)) ** power
            return weights / weights.sum(1, keepdim=True).clamp_min(1e-30)

        return self.sample_chain(predict, state, noise)


def count_continuations(tokens: Tensor, position: Tensor, vocab: int, columns: int) -> Tensor:
    """Count the tokens that followed the longest known context of `position` `[B, 1]`, float32 `[B, V]`.

    All of `tokens` `[B, N]` before the position are known.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_alike, follows = places < position, torch.zeros_like(tokens, dtype=torch.bool)
    for offset in _OFFSETS:  # longer and longer contexts
        here, there = (find_neighbors(tokens, each, offset, columns) for each in (position, places))
        is_alike = is_alike & (here == there)
        follows = torch.where(is_alike.any(1, keepdim=True), is_alike, follows)
    counts = torch.zeros(len(tokens), vocab, dtype=torch.float32, device=tokens.device)
    return counts.scatter_add_(1, tokens, follows.float())


def find_neighbors(tokens: Tensor, position: Tensor, offset: tuple[int, int], columns: int) -> Tensor:
    """Return the tokens at an offset from each `position` `[B, S]`, int64 `[B, S]`, of `tokens` `[B, N]`; -1 off the grid."""
    down, right = offset
    row, column = position // columns + down, position % columns + right
    is_inside = (row >= 0) & (column >= 0) & (column < columns)
    return torch.where(is_inside, tokens.gather(1, (row * columns + column).clamp(min=0)), -1)


@dataclass(frozen=True)
class Recycle(ChainDrafter):
    """Draft from the target's latest distribution after the same token (Luo et al. 2024, arXiv:2408.08696).

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

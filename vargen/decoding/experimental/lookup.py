"""Lookup: draft what followed the same context earlier in the image (Saxena 2023, prompt lookup, in two dimensions).

Shape suffixes: B slots, N tokens of the grid, S positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vargen.decoding.noise import Noise
from vargen.decoding.speculative import ChainDrafter
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft
from vargen.values import number_field

_OFFSETS = ((0, -1), (-1, 0), (-1, 1), (0, -2))  # (row, column) of the most informative neighbors, in order


@dataclass(frozen=True)
class Lookup(ChainDrafter):
    """Draft what followed the same context earlier.

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

"""Lookup: draft what followed the same context earlier in the image (Saxena 2023, prompt lookup, in two dimensions).

Shape suffixes: B slots, N tokens of the grid, S positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.speculative import ChainDrafter
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Tree
from vargen.values import number_field, validate_fields

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

    Raises:
        ValueError: if a value is out of range. `bind` raises it if the chain does not fit the grid.
    """

    length: int = number_field(3, 1, is_integer=True)
    sharpness: float = number_field(2.0, 0, open_below=True)
    chain: Tree = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validate_fields(self)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        known, found = state.tokens.clone(), torch.ones_like(state.length, dtype=torch.bool)
        power = self.sharpness / state.sampling.temperature[:, :, 0]
        drafted, probs, valid = [], [], []
        for slot in range(self.length):
            position = (state.length + slot)[:, None]
            counts = count_continuations(known, position, state.vocab, state.columns)
            most = counts.amax(1, keepdim=True)
            found = found & (most[:, 0] > 0) & (position[:, 0] < state.num_tokens)
            weights = (counts / most.clamp_min(1e-30)) ** power
            q = torch.where(found[:, None], weights / weights.sum(1, keepdim=True), 0.0)
            token = torch.where(found[:, None], noise.shift(slot).sample(q[:, None], Purpose.DRAFT), 0)
            known.scatter_(1, position, token)
            drafted.append(token)
            probs.append(q)
            valid.append(found)
        return Draft(torch.cat(drafted, 1), self.chain, torch.stack(probs, 1), torch.stack(valid, 1))


def count_continuations(tokens: Tensor, position: Tensor, vocab: int, columns: int) -> Tensor:
    """Count the tokens that followed the longest known context of `position` `[B, 1]`, float32 `[B, V]`.

    All of `tokens` `[B, N]` before the position are known.
    """
    here = make_context_keys(tokens, position, vocab, columns)
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    then = make_context_keys(tokens, places, vocab, columns)
    is_alike = torch.zeros_like(tokens, dtype=torch.bool)
    for divisor in _prefix_divisors(vocab):  # of longer and longer contexts
        more = (then // divisor == here // divisor) & (places < position)
        is_alike = torch.where(more.any(1, keepdim=True), more, is_alike)
    counts = torch.zeros(len(tokens), vocab + 1, dtype=torch.float32, device=tokens.device)  # the last column: other tokens
    return counts.scatter_add_(1, torch.where(is_alike, tokens, vocab), is_alike.float())[:, :-1]


def make_context_keys(tokens: Tensor, position: Tensor, vocab: int, columns: int) -> Tensor:
    """Encode the context of `position` `[B, S]` in `tokens` `[B, N]` as integers, int64 `[B, S]`.

    The left token is the most significant digit. Positions outside the grid count as token V.
    """
    column, key = position % columns, torch.zeros_like(position)
    for down, right in _OFFSETS[: len(_prefix_divisors(vocab))]:
        there = (position + down * columns >= 0) & (column + right >= 0) & (column + right < columns)
        source = (position + down * columns + right).clamp(min=0)
        key = key * (vocab + 1) + torch.where(there, tokens.gather(1, source), vocab)
    return key


def _prefix_divisors(vocab: int) -> list[int]:
    """Divisors that reduce a context to its first 1, 2, ... tokens; as many of `_OFFSETS` as fit into an int64."""
    digits = next(n for n in range(len(_OFFSETS), 0, -1) if (vocab + 1) ** n < 2**62)
    return [(vocab + 1) ** n for n in reversed(range(digits))]

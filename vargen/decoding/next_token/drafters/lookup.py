"""Lookup drafting: propose what followed the same context earlier, in the current image and in stored images.

Shape suffixes: B images, M stored images, N tokens of the grid, K matches, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.drafters.base import ChainDrafter
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import MIN_TEMPERATURE, RowSampling, Sampling
from vargen.decoding.tree import Draft, Output, Tree
from vargen.values import number_field, validate_fields


class NGramIndex:
    """Stored tokens, sorted by context.

    A context is encoded as one integer whose most significant digit is the left token. All tokens with the same left token,
    with the same left and upper token, and so on, therefore form a contiguous range of the sorted keys.

    Args:
        examples: integers `[M, N]`, tokens of M images with `columns` columns.
        vocab: V.
    """

    in_place = True  # it never changes; see `graphs.find_replaced`
    is_shared = True  # see `rows.insert_rows`

    def __init__(self, examples: Tensor, vocab: int, columns: int):
        tokens = examples.long()
        position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        keys = make_context_keys(tokens, position, vocab, columns).flatten()
        order = keys.argsort()
        self.keys, self.following, self.parts = keys[order], tokens.flatten()[order], _prefix_divisors(vocab)

    def find(self, key: Tensor, count: int) -> Tensor:
        """Return `count` tokens that followed the longest known prefix of the context `key` `[B]`, int64 `[B, K]`.

        They are spaced evenly over all matches; -1 if not even the left token occurs.
        """
        found = torch.full((len(key), count), -1, device=key.device)
        steps = torch.arange(count, device=key.device)
        for width in self.parts:  # longer matches are written later and override shorter ones
            low = torch.searchsorted(self.keys, key // width * width)
            size = torch.searchsorted(self.keys, (key // width + 1) * width) - low
            at = low[:, None] + (2 * steps + 1) * size[:, None] // (2 * count)
            found = torch.where(size[:, None] > 0, self.following[at.clamp(max=len(self.following) - 1)], found)
        return found


_CONTEXT_OFFSETS = ((0, -1), (-1, 0), (-1, 1), (0, -2))  # (row, column) offsets of the most informative neighbors, in order


def _prefix_divisors(vocab: int) -> list[int]:
    """Divisors that reduce a context to its first 1, 2, ... tokens; as many of `_CONTEXT_OFFSETS` as fit into an int64."""
    digits = next(n for n in range(len(_CONTEXT_OFFSETS), 0, -1) if (vocab + 1) ** n < 2**62)
    return [(vocab + 1) ** n for n in reversed(range(digits))]


def make_context_keys(tokens: Tensor, position: Tensor, vocab: int, columns: int) -> Tensor:
    """Encode the context of `position` `[B, S]` in `tokens` `[B, N]` as integers, int64 `[B, S]`.

    Positions outside the grid count as token V.
    """
    column, key = position % columns, torch.zeros_like(position)
    for down, right in _CONTEXT_OFFSETS[: len(_prefix_divisors(vocab))]:
        there = (position + down * columns >= 0) & (column + right >= 0) & (column + right < columns)
        source = (position + down * columns + right).clamp(min=0)
        key = key * (vocab + 1) + torch.where(there, tokens.gather(1, source), vocab)
    return key


@lru_cache(maxsize=2)
def _find_index(examples: Tensor, vocab: int, columns: int, device: torch.device) -> NGramIndex:
    """Build the index, or return it if it was built for the same tensor object, by which tensors are hashed."""
    return NGramIndex(examples.to(device), vocab, columns)


@register_state
@dataclass
class LookupState:
    num_tokens: int
    columns: int
    vocab: int
    power: float | Tensor  # a tensor `[B, 1]` if temperatures differ between images
    index: NGramIndex | None


@dataclass(frozen=True)
class Lookup(ChainDrafter):
    """Draft what followed the same context earlier: two-dimensional n-gram lookup with retrieval.

    Prompt lookup (Saxena 2023) copies what followed the last occurrence of the same words; REST (He et al. 2024) retrieves it
    from a text store. In an image, a token depends on the one above as much as on the one before. The context therefore
    consists of the tokens to the left, above, above right, and second to the left, as many of them as have occurred together.
    Tokens are not copied: those that followed the context, in this image and in the model's `example_tokens`, are counted, and
    a draft token is sampled from the counts, which are recorded as q. The next draft token is looked up after it.

    Args:
        length: draft tokens per pass, at least 1.
        max_matches: number of tokens taken from the examples per draft token, spaced evenly over all matches; 0 uses the image
            alone.
        image_weight: weight of a token of the image itself relative to one of the examples, at least 0.
        sharpness: counts are raised to the power sharpness / temperature, above 0; guidance makes the target sharper than data.

    Raises:
        ValueError: if a value is out of range. `bind` raises it if the chain does not fit the grid, or the examples have
            another grid.
    """

    length: int = number_field(3, 1, is_integer=True)
    max_matches: int = number_field(64, 0, is_integer=True)
    image_weight: float = number_field(8.0, 0)
    sharpness: float = number_field(2.0, 0, open_below=True)

    def __post_init__(self) -> None:
        validate_fields(self)
        if not (self.image_weight or self.max_matches):
            raise ValueError(f"image_weight must be above 0 if max_matches is 0, got {self.image_weight}")

    def bind(self, model: TokenModel) -> Self:
        """Return this drafter.

        Raises:
            ValueError: if the chain does not fit after the first token of the grid, or the examples do not match the grid.
        """
        examples, tokens = model.example_tokens, model.grid[0] * model.grid[1]
        if examples is not None and (examples.dim() != 2 or examples.shape[1] != tokens):
            raise ValueError(f"example_tokens must be [images, {tokens}], got {list(examples.shape)}")
        return super().bind(model)

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> LookupState:
        rows, columns = model.grid
        examples = model.example_tokens if self.max_matches else None
        index = None if examples is None else _find_index(examples, model.vocab, columns, seeds.device)
        power: float | Tensor = self.sharpness / max(sampling.temperature, MIN_TEMPERATURE)
        if isinstance(sampling, RowSampling):
            temperatures = torch.tensor(
                [[each.temperature] for each in sampling.rows], dtype=torch.float32, device=seeds.device
            )
            power = self.sharpness / temperatures.clamp(min=MIN_TEMPERATURE)
        return LookupState(rows * columns, columns, model.vocab, power, index)

    def propose(self, state: LookupState, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        known, found = tokens.clone(), torch.ones_like(length, dtype=torch.bool)
        drafted, probs, valid = [], [], []
        for slot in range(self.length):
            position = (length + slot)[:, None]
            weights = self.count_continuations(state, known, position)
            most = weights.amax(1, keepdim=True)
            found = found & (most[:, 0] > 0) & (position[:, 0] < state.num_tokens)
            weights = (weights / most.clamp_min(1e-30)) ** state.power
            q = torch.where(found[:, None], weights / weights.sum(1, keepdim=True), 0.0)
            token = torch.where(found[:, None], noise.shift(slot).sample(q[:, None], Purpose.DRAFT), 0)
            known.scatter_(1, position, token)
            drafted.append(token)
            probs.append(q)
            valid.append(found)
        chain = Tree.make_chain(self.length, tokens.device)
        return Draft(torch.cat(drafted, 1), chain, torch.stack(probs, 1), torch.stack(valid, 1))

    def count_continuations(self, state: LookupState, tokens: Tensor, position: Tensor) -> Tensor:
        """Weighted counts of the tokens that followed the context of `position` `[B, 1]`, float32 `[B, V]`.

        All tokens before the position are known.
        """
        counts = torch.zeros(
            len(tokens), state.vocab + 1, dtype=torch.float32, device=tokens.device
        )  # the last column collects padding
        here = make_context_keys(tokens, position, state.vocab, state.columns)
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        then = make_context_keys(tokens, places, state.vocab, state.columns)
        alike = torch.zeros_like(tokens, dtype=torch.bool)
        for width in _prefix_divisors(state.vocab):
            more = (then // width == here // width) & (places < position)
            alike = torch.where(more.any(1, keepdim=True), more, alike)
        counts.scatter_add_(1, torch.where(alike, tokens, state.vocab), self.image_weight * alike.float())
        if state.index is not None:
            taken = state.index.find(here[:, 0], self.max_matches)
            counts.scatter_add_(1, torch.where(taken < 0, state.vocab, taken), torch.ones_like(taken, dtype=torch.float32))
        return counts[:, :-1]

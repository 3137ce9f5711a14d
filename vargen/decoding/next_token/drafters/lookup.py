"""Lookup drafting: propose what followed the same context earlier, in the current image and in stored images.

Shape suffixes: B images, M stored images, N tokens of the grid, K counted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Output, Step, Tree
from vargen.decoding.next_token.protocols import ExampleModel, TokenModel
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import MIN_TEMPERATURE, Sampling
from vargen.values import parse_float, parse_int, short_repr


class Index:
    """Stored tokens, sorted by context.

    A context is encoded as one integer whose most significant digit is the left token. All tokens with the same left token,
    with the same left and upper token, and so on, therefore form a contiguous range of the sorted keys.

    Args:
        examples: integers `[M, N]`, tokens of M images with `columns` columns.
        vocab: V.
    """

    def __init__(self, examples: Tensor, vocab: int, columns: int):
        tokens = examples.long()
        position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        keys = surroundings(tokens, position, vocab, columns).flatten()
        order = keys.argsort()
        self.keys, self.following, self.parts = keys[order], tokens.flatten()[order], _parts(vocab)

    def counted(self, key: Tensor, count: int) -> Tensor:
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


_AROUND = ((0, -1), (-1, 0), (-1, 1), (0, -2))  # (row, column) offsets of the most informative neighbors, in order


def _parts(vocab: int) -> list[int]:
    """Divisors that reduce a context to its first 1, 2, ... tokens; as many of `_AROUND` as fit into an int64."""
    digits = next(n for n in range(len(_AROUND), 0, -1) if (vocab + 1) ** n < 2**62)
    return [(vocab + 1) ** n for n in reversed(range(digits))]


def surroundings(tokens: Tensor, position: Tensor, vocab: int, columns: int) -> Tensor:
    """Encode the context of `position` `[B, S]` in `tokens` `[B, N]` as integers, int64 `[B, S]`.

    Positions outside the grid count as token V.
    """
    column, key = position % columns, torch.zeros_like(position)
    for down, right in _AROUND[: len(_parts(vocab))]:
        there = (position + down * columns >= 0) & (column + right >= 0) & (column + right < columns)
        source = (position + down * columns + right).clamp(min=0)
        key = key * (vocab + 1) + torch.where(there, tokens.gather(1, source), vocab)
    return key


@lru_cache(maxsize=2)
def _index(examples: _Examples, vocab: int, columns: int, device: torch.device) -> Index:
    return Index(examples.tokens.to(device), vocab, columns)


class _Examples:
    """A tensor as a cache key, compared by identity, not by value."""

    def __init__(self, tokens: Tensor):
        self.tokens = tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Examples) and other.tokens is self.tokens

    def __hash__(self) -> int:
        return id(self.tokens)


@dataclass
class _State:
    seeds: Tensor
    total: int
    columns: int
    vocab: int
    power: float
    index: Index | None


@dataclass(frozen=True)
class Lookup:
    """Draft what followed the same context earlier: two-dimensional n-gram lookup with retrieval.

    Prompt lookup (Saxena 2023) copies what followed the last occurrence of the same words; REST (He et al. 2024) retrieves it
    from a text store. In an image, a token depends on the one above as much as on the one before. The context therefore
    consists of the tokens to the left, above, above right, and second to the left, as many of them as have occurred together.
    Tokens are not copied: those that followed the context, in this image and in the model's `examples`, are counted, and a
    draft token is sampled from the counts, which are recorded as q. The next draft token is looked up after it.

    Args:
        drafts: draft tokens per pass, at least 1.
        counted: number of tokens taken from the examples per draft token, spaced evenly over all matches; 0 uses the image
            alone.
        own: weight of a token of the image itself relative to one of the examples, at least 0.
        sharpness: counts are raised to the power sharpness / temperature, above 0; guidance makes the target sharper than data.

    Raises:
        ValueError: if a value is out of range. `bind` raises it if the chain does not fit the grid, or the examples have
            another grid.
    """

    drafts: int = 3
    counted: int = 64
    own: float = 8.0
    sharpness: float = 2.0
    topology: str = field(default="chain", init=False)

    def __post_init__(self) -> None:
        drafts, counted, own = parse_int(self.drafts, 1), parse_int(self.counted, 0), parse_float(self.own)
        sharpness = parse_float(self.sharpness)
        if drafts is None:
            raise ValueError(f"drafts must be a whole number of at least 1, got {short_repr(self.drafts)}")
        if counted is None:
            raise ValueError(f"counted must be a whole number of at least 0 (no examples), got {short_repr(self.counted)}")
        if own is None or own < 0 or not (own or counted):
            raise ValueError(f"own must be at least 0, and above 0 where nothing else is counted, got {short_repr(self.own)}")
        if sharpness is None or sharpness <= 0:
            raise ValueError(f"sharpness must be above 0, got {short_repr(self.sharpness)}")
        for name, value in (("drafts", drafts), ("counted", counted), ("own", own), ("sharpness", sharpness)):
            object.__setattr__(self, name, value)

    @property
    def max_fed(self) -> int:
        return self.drafts + 1

    def bind(self, model: TokenModel) -> Lookup:
        """Return this drafter.

        Raises:
            ValueError: if the chain does not fit after the first token of the grid, or the examples do not match the grid.
        """
        self.check_grid(model.grid[0] * model.grid[1])
        examples = model.examples if isinstance(model, ExampleModel) else None
        if examples is not None and (examples.dim() != 2 or examples.shape[1] != model.grid[0] * model.grid[1]):
            raise ValueError(f"examples must be [pictures, {model.grid[0] * model.grid[1]}], got {list(examples.shape)}")
        return self

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless the chain fits after the first token of a grid of `tokens` tokens."""
        if self.drafts >= tokens:
            raise ValueError(f"drafts must be from 1 to {tokens - 1}, one less than the grid's tokens, got {self.drafts}")

    def fitted(self, tokens: int) -> Lookup:
        """Return the drafter with a chain that fits after the first token of a grid of `tokens` tokens."""
        return replace(self, drafts=min(self.drafts, tokens - 1))

    def resized(self, window: int | str) -> Lookup:
        """Return this drafter unchanged: numbers apply to windows, and a chain has none."""
        return self

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        rows, columns = model.grid
        examples = model.examples if isinstance(model, ExampleModel) and self.counted else None
        index = None if examples is None else _index(_Examples(examples), model.vocab, columns, seeds.device)
        power = self.sharpness / max(sampling.temperature, MIN_TEMPERATURE)
        return _State(seeds, rows * columns, columns, model.vocab, power, index)

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        known, found = tokens.clone(), torch.ones_like(length, dtype=torch.bool)
        drafted, probs, valid = [], [], []
        for slot in range(self.drafts):
            position = (length + slot)[:, None]
            weights = self.weights(state, known, position)
            most = weights.amax(1, keepdim=True)
            found = found & (most[:, 0] > 0) & (position[:, 0] < state.total)
            weights = (weights / most.clamp_min(1e-30)) ** state.power
            q = torch.where(found[:, None], weights / weights.sum(1, keepdim=True), 0.0)
            token = torch.where(found[:, None], Noise(state.seeds, position, step).draw(q[:, None], Purpose.DRAFT), 0)
            known.scatter_(1, position, token)
            drafted.append(token)
            probs.append(q)
            valid.append(found)
        chain = Tree.of_chain(self.drafts, tokens.device)
        return Draft(torch.cat(drafted, 1), chain, torch.stack(probs, 1), torch.stack(valid, 1))

    def weights(self, state: _State, tokens: Tensor, position: Tensor) -> Tensor:
        """Weighted counts of the tokens that followed the context of `position` `[B, 1]`, float32 `[B, V]`.

        All tokens before the position are known.
        """
        counts = torch.zeros(len(tokens), state.vocab + 1, device=tokens.device)  # the last column collects padding
        here = surroundings(tokens, position, state.vocab, state.columns)
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        then = surroundings(tokens, places, state.vocab, state.columns)
        alike = torch.zeros_like(tokens, dtype=torch.bool)
        for width in _parts(state.vocab):
            more = (then // width == here // width) & (places < position)
            alike = torch.where(more.any(1, keepdim=True), more, alike)
        counts.scatter_add_(1, torch.where(alike, tokens, state.vocab), self.own * alike)
        if state.index is not None:
            taken = state.index.counted(here[:, 0], self.counted)
            counts.scatter_add_(1, torch.where(taken < 0, state.vocab, taken), torch.ones_like(taken, dtype=torch.float32))
        return counts[:, :-1]

    def observe(self, state: _State, step: Step) -> _State:
        """Return the state unchanged: the next lookup reads the committed tokens directly."""
        return state

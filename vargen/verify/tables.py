"""Tiny causal models whose joint distribution can be enumerated: their logits are a table over position and two tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import AutoregressiveHead, Noise, Output, ParallelHeads, Sampling, ScaleModel, TokenModel, Tree
from vargen.decoding.interfaces import DraftHead, LowResModel
from vargen.decoding.noise import Purpose
from vargen.decoding.sampling import SlotSampling


def encode_sequences(tokens: Tensor, vocab: int) -> Tensor:
    """Number sequences `[B, N]` as the entries of a flattened `joint`, int64 `[B]`: the first token is the most significant."""
    return (tokens * vocab ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(1)


@dataclass
class TableState:
    history: Tensor  # [B, N + T] cached tokens
    length: Tensor  # [B]
    condition: Tensor  # [B]
    fed: Tensor | None = None


def _features(tokens: Tensor, condition: Tensor) -> Tensor:
    """Features `[B, T, 2]` of a table's slots: the token, and the condition of the image."""
    return torch.stack([tokens, condition[:, None].expand_as(tokens)], dim=-1).float()


class TableModel(TokenModel):
    """`TokenModel` of V tokens on a 1 x N grid; the condition is int64 `[B]`, and each value has its own table.

    At the positions in `forced` one token has probability 1, as end-of-line tokens do in some models.
    """

    num_layers = 4  # for `skip_layers` only: a table has no layers

    def __init__(
        self,
        vocab: int,
        tokens: int,
        conditions: int = 2,
        seed: int = 0,
        spread: float = 1.5,
        forced: dict[int, int] | None = None,
        rows: int = 1,
    ):
        generator = torch.Generator().manual_seed(seed)
        shape = (conditions, tokens, vocab + 1, vocab + 1, vocab)
        self.table = torch.randn(shape, generator=generator) * spread
        for position, token in (forced or {}).items():
            self.table[:, position] = -1e4
            self.table[:, position, :, :, token] = 0.0
        self.vocab, self.tokens = vocab, tokens
        self.grid = (rows, tokens // rows)
        self.device = torch.device("cpu")
        self.passes: list[int] = []
        self.draft_model: TableModel | None = None
        self.draft_heads: dict[str, DraftHead] = {}
        self.low_res: TableLowRes | None = None

    def logits(self, condition: Tensor, position: Tensor, before: Tensor, last: Tensor) -> Tensor:
        return self.table[condition, position.clamp(max=self.tokens - 1), before, last]

    def skip_layers(self, layers: Sequence[int]) -> TableModel:
        """Return a modified table, which differs more the more layers are skipped."""
        view = copy(self)
        generator = torch.Generator().manual_seed(sum(2**layer for layer in layers))
        view.table = self.table + 0.3 * len(layers) * torch.randn(self.table.shape, generator=generator)
        return view

    def allocate(self, condition: Tensor, width: int, slots: int | None = None) -> TableState:
        B = len(condition) if slots is None else slots
        history = torch.zeros(B, self.tokens + width + 1, dtype=torch.int64)
        return TableState(history, torch.zeros(B, dtype=torch.int64), torch.zeros(B, dtype=torch.int64))

    def prefill(self, condition: Tensor, state: TableState, rows: Tensor | None = None) -> Output:
        rows = torch.arange(len(state.length)) if rows is None else rows
        state.history[rows], state.length[rows], state.condition[rows] = 0, 0, condition
        start = torch.full_like(condition, self.vocab)
        logits = self.logits(condition, torch.zeros_like(condition), start, start)
        return Output(logits[:, None], _features(start[:, None], condition))

    def forward(self, tokens: Tensor, state: TableState, tree: Tree) -> Output:
        condition, held = state.condition, state
        held.fed = tokens
        self.passes.append(tokens.shape[1])
        rows = []
        previous = held.history.gather(1, (held.length - 1).clamp_min(0)[:, None])[:, 0]
        root = torch.where(held.length > 0, previous, self.vocab)
        parents, depth = tree.parents.expand_as(tokens), tree.depth.expand_as(tokens)
        above = torch.where(parents < 0, root[:, None], tokens.gather(1, parents.clamp(min=0)))
        for slot in range(tokens.shape[1]):
            rows.append(self.logits(condition, held.length + 1 + depth[:, slot], above[:, slot], tokens[:, slot]))
        return Output(torch.stack(rows, dim=1), _features(tokens, condition))

    def commit(self, state: TableState, path: Tensor, count: Tensor, tree: Tree) -> None:
        held = state
        assert held.fed is not None
        kept = held.fed.gather(1, path)
        for a in range(path.shape[1]):
            at = (held.length + a).clamp(max=held.history.shape[1] - 1)[:, None]
            old = held.history.gather(1, at)
            held.history.scatter_(1, at, torch.where((a < count)[:, None], kept[:, a : a + 1], old))
        held.length += count

    def rollback(self, state: TableState, length: Tensor) -> None:
        state.length.copy_(length)

    def joint(self, condition: int, to_probs: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the probabilities of all V^N sequences, float64 `[V] * N`; `to_probs(logits)` gives those of a token."""
        V, N = self.vocab, self.tokens
        total = torch.ones(())
        sequences = torch.cartesian_prod(*[torch.arange(V)] * N) if N > 1 else torch.arange(V)[:, None]
        total = torch.ones(len(sequences), dtype=torch.float64)
        start = torch.full((len(sequences),), V)
        for n in range(N):
            last = sequences[:, n - 1] if n else start
            before = sequences[:, n - 2] if n > 1 else start
            where = torch.full((len(sequences),), n)
            probabilities = to_probs(self.logits(torch.full_like(where, condition), where, before, last)).double()
            total *= probabilities.gather(1, sequences[:, n : n + 1])[:, 0]
        return total.view([V] * N)

    def find_most_probable(self, condition: int, to_probs: Callable[[Tensor], Tensor]) -> tuple[int, ...]:
        """Return the most probable sequence of N tokens."""
        joint = self.joint(condition, to_probs)
        return tuple(int(place) for place in torch.unravel_index(joint.argmax(), joint.shape))


class TableEagle(AutoregressiveHead):
    """`AutoregressiveHead` that looks up a table by a slot's token and the token in its feature.

    With the target's own table its distribution equals the target's, provided that every token comes with the feature it was
    sampled from.
    """

    def __init__(self, table: TableModel):
        self.table, self.vocab, self.grid = table, table.vocab, table.grid

    def allocate(self, slots: int, width: int) -> TableState:
        empty = torch.zeros(slots, dtype=torch.int64)
        return TableState(torch.zeros(slots, 0, dtype=torch.int64), empty, empty.clone())

    def reset(self, state: TableState, rows: Tensor) -> None:
        state.length[rows] = 0

    def forward(self, tokens: Tensor, features: Tensor, state: TableState, tree: Tree) -> Output:
        depth = tree.depth.expand(len(tokens), -1)[:, -tokens.shape[1] :]
        before, condition = features.long().unbind(-1)
        logits = self.table.logits(condition, state.length[:, None] + depth + 1, before, tokens)
        return Output(logits, _features(tokens, condition[:, 0]))

    def commit(self, state: TableState, count: Tensor) -> None:
        state.length += count


class TableMedusa(ParallelHeads):
    """`ParallelHeads` that look up a table by the root and the token in its feature, at the position of each token ahead."""

    def __init__(self, table: TableModel, heads: int = 3):
        self.table, self.num_heads, self.vocab, self.grid = table, heads, table.vocab, table.grid

    def forward(self, tokens: Tensor, features: Tensor, position: Tensor) -> Tensor:
        before, condition = features[:, 0].long().unbind(-1)
        rows = [self.table.logits(condition, position + 1 + ahead, before, tokens) for ahead in range(self.num_heads)]
        return torch.stack(rows, dim=1)


class TableLowRes(LowResModel):
    """`LowResModel` whose image is a single token.

    That token and the token two places earlier select the probabilities in another table, so that they depend on committed and
    drafted tokens.
    """

    def __init__(self, table: TableModel):
        self.table, self.vocab, self.grid = table, table.vocab, table.grid

    def start(self, condition: Tensor, seeds: Tensor, sampling: Sampling) -> Tensor:
        """int64 `[n, 2]`: the condition, and the token."""
        even = torch.full((len(seeds), 1, self.vocab), 1.0 / self.vocab)
        coarse = Noise(seeds, torch.zeros(len(seeds), 1, dtype=torch.int64)).sample(even, Purpose.LOW_RES)[:, 0]
        return torch.stack([condition, coarse], 1)

    def probs(self, images: Tensor, tokens: Tensor, length: Tensor, position: Tensor, sampling: SlotSampling) -> Tensor:
        condition, coarse = images[:, :1], images[:, 1:]
        seen = tokens.gather(1, torch.minimum(position - 2, length[:, None] - 1).clamp(min=0))
        return self.table.logits(condition, position, coarse, seen).softmax(-1)


@dataclass
class ScaleState:
    """State of B images: their tables and, for each cached scale, the input from which keys and values would be computed."""

    condition: Tensor
    fed: list[Tensor] = field(default_factory=list)


class ScaleTable(ScaleModel):
    """`ScaleModel` of V tokens; the condition is int64 `[B]`, with a table for each value.

    A canvas holds the tokens so far, and V where there is none. A pass raises an error if its earlier scales were fed other
    inputs than the current ones, because a real cache would be stale.
    """

    def __init__(
        self,
        vocab: int = 3,
        scale_tokens: tuple[int, ...] = (1, 2, 2),
        conditions: int = 2,
        seed: int = 0,
        spread: float = 1.5,
        codes: tuple[int, ...] | None = None,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.scale_tokens = vocab, scale_tokens
        self.scale_codes = codes or (vocab,) * len(scale_tokens)
        self.ends = list(accumulate(scale_tokens))
        self.tables = [
            torch.randn(conditions, (vocab + 1) ** (end - n), n, vocab, generator=generator) * spread
            for n, end in zip(scale_tokens, self.ends, strict=True)
        ]
        self.device = torch.device("cpu")
        self.draft_model: ScaleTable | None = None
        self.cost_key: str | None = None
        self.passes: list[tuple[int, int]] = []  # first and last scale of each pass

    def logits(self, condition: Tensor, before: Tensor, scale: int) -> Tensor:
        """Logits `[B, n, codes]` after tokens `[B, ...]` of all earlier scales."""
        weights = (self.vocab + 1) ** torch.arange(before.shape[1])
        return self.tables[scale][condition, (before * weights).sum(1)][..., : self.scale_codes[scale]]

    def allocate(self, condition: Tensor, slots: int, is_guided: bool = True) -> ScaleState:
        return ScaleState(torch.zeros(slots, dtype=torch.int64))

    def reset(self, state: ScaleState, condition: Tensor) -> None:
        state.condition.copy_(condition)
        state.fed.clear()

    def canvas(self, batch: int) -> Tensor:
        return torch.full((batch, self.ends[-1]), self.vocab)

    def add(self, canvas: Tensor, tokens: Tensor, scale: int) -> tuple[Tensor, Tensor | None]:
        canvas = canvas.clone()
        canvas[:, self.ends[scale] - self.scale_tokens[scale] : self.ends[scale]] = tokens
        return canvas, canvas if scale + 1 < len(self.scale_tokens) else None

    def forward(self, state: ScaleState, inputs: Sequence[Tensor | None], guidance: float) -> Tensor:
        first = len(state.fed)
        fed = [self.canvas(len(state.condition)) if each is None else each for each in inputs]
        if not first < len(fed):
            raise AssertionError(f"{first} scales held, {len(fed)} fed")
        for held, now in zip(state.fed, fed, strict=False):
            if not torch.equal(held, now):
                raise AssertionError("the state holds a scale that was fed something else")
        last = len(fed) - 1
        self.passes.append((first, last))
        state.fed[:] = [each.clone() for each in fed]  # what the loop will write to
        return self.logits(state.condition, fed[last][:, : self.ends[last] - self.scale_tokens[last]], last)

    def rollback(self, state: ScaleState, scale: int) -> None:
        del state.fed[scale:]

    def joint(self, condition: int, to_probs: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the probabilities of all V^L images, float64 `[V^L]`; the first token is the most significant digit."""
        V, L = self.vocab, self.ends[-1]
        images = torch.cartesian_prod(*[torch.arange(V)] * L)
        which = torch.full((len(images),), condition)
        total = torch.ones(len(images), dtype=torch.float64)
        for scale, (n, end) in enumerate(zip(self.scale_tokens, self.ends, strict=True)):
            probs: Any = to_probs(self.logits(which, images[:, : end - n], scale)).double()
            probs = torch.nn.functional.pad(probs, (0, V - probs.shape[-1]))
            total *= probs.gather(2, images[:, end - n : end, None])[..., 0].prod(1)
        return total

"""Trained drafters of a LlamaGen transformer as decoding sees them: its embedding, norm and output, guidance rows, caches.

Shape suffixes: B images, R rows (B, or 2 B under guidance: conditional first), T fed slots, D width, V vocabulary, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vargen.decoding import Output, Tree
from vargen.models.heads.eagle import EagleDrafter
from vargen.models.heads.medusa import MedusaDrafter
from vargen.models.kv_cache import KVCache
from vargen.modes import normal_tensors


class Target(Protocol):
    """What drafters share with the transformer whose features they extend."""

    halves: int

    @property
    def vocab(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    @property
    def device(self) -> torch.device: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[R, T, D]` of tokens `[B, T]`."""

    def head(self, hidden: Tensor, position: Tensor) -> Tensor:
        """Guided logits `[B, T, V]` of what follows slots at positions `[B, T]`, by states `[R, T, D]` before the norm."""


@dataclass
class _Held:
    """The cache, and the target's features by slot `[R, N + scratch, D]` where those above are taken."""

    cache: KVCache
    seen: Tensor | None


class _OfTarget:
    """A drafter draws the tokens of its target."""

    target: Target

    @property
    def vocab(self) -> int:
        return self.target.vocab

    @property
    def grid(self) -> tuple[int, int]:
        return self.target.grid


class EagleModel(_OfTarget):
    """`AutoregressiveHead` of an `EagleDrafter` and its target."""

    def __init__(self, drafter: EagleDrafter, target: Target):
        self.drafter, self.target = drafter, target

    def start(self, images: int, max_fed: int) -> _Held:
        rows, device = images * self.target.halves, self.target.device
        cache, seen = self.drafter.new_cache(rows, max_fed, device), None
        if self.drafter.config.above:
            with normal_tensors():
                size = (rows, self.drafter.tokens + max_fed, self.drafter.config.dim)
                seen = torch.zeros(size, dtype=self.drafter.dtype, device=device)
        return _Held(cache, seen)

    def forward(self, tokens: Tensor, features: Tensor, state: _Held, tree: Tree) -> Output:
        B, T = tokens.shape
        cache, halves = state.cache, self.target.halves
        earlier = tree.parents.shape[-1] - T
        depth = tree.depth[..., earlier:]
        position = cache.length[:B, None] + depth
        places = {}
        if not tree.chain:
            ancestors = tree.ancestors[..., earlier:, :]
            places["ancestors"] = ancestors if ancestors.dim() == 2 else ancestors.repeat(halves, 1, 1)
            places["positions"] = position.repeat(halves, 1)
        above = None if state.seen is None else self._above(features, state, position, earlier)
        hidden = self.drafter(features, self.target.embed(tokens), cache, earlier=earlier, above=above, **places)
        return Output(self.target.head(hidden, position), hidden)

    def _above(self, features: Tensor, state: _Held, position: Tensor, earlier: int) -> Tensor:
        """The target's features behind the tokens above those to predict, `[R, T, D]`; zero where it has seen none.

        Slot j holds the feature that predicted token j, so that behind the token above token j + 1 is in slot j + 2 - columns.
        """
        seen, halves, columns = state.seen, self.target.halves, self.target.grid[1]
        assert seen is not None
        position = position.repeat(halves, 1)
        if earlier == 0:  # tokens that the target has drawn; behind them come those that it has not
            at = position.clamp(max=seen.shape[1] - 1)[..., None].expand(-1, -1, seen.shape[2])
            seen.scatter_(1, at, features.to(seen.dtype))
        source = position + 2 - columns
        last = position if earlier == 0 else state.cache.length[:, None]
        known = (source >= 1) & (source <= last)
        index = source.clamp(0, seen.shape[1] - 1)[..., None].expand(-1, -1, seen.shape[2])
        return seen.gather(1, index) * known[..., None]

    def commit(self, state: _Held, count: Tensor) -> None:
        state.cache.advance(count.repeat(self.target.halves))


class MedusaHeads(_OfTarget):
    """`ParallelHeads` of a `MedusaDrafter` and its target."""

    def __init__(self, drafter: MedusaDrafter, target: Target):
        self.drafter, self.target = drafter, target

    @property
    def heads(self) -> int:
        return self.drafter.config.heads

    def forward(self, tokens: Tensor, features: Tensor, position: Tensor) -> Tensor:
        hidden = self.drafter(features, self.target.embed(tokens[:, None]))[:, 0]
        ahead = torch.arange(self.heads, device=position.device)
        return self.target.head(hidden, position[:, None] + ahead)

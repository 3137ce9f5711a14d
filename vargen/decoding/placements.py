"""Policies that place blocks of the small and the large model without looking at them: by number, by chance, or as before.

They are the baselines of those that look; see `vargen.decoding.policies`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vargen.decoding.block_stats import MAKERS
from vargen.decoding.noise import Purpose, coins
from vargen.decoding.router import Router, check_share
from vargen.values import shown, whole


@dataclass(frozen=True)
class Unscored:
    """The large model draws all blocks, or the small one.

    Raises:
        TypeError: for a `draft` that is no truth value.
    """

    draft: bool = False
    scored = reference = False

    def __post_init__(self) -> None:
        if not isinstance(self.draft, bool):
            raise TypeError(f"draft must be True or False, got {shown(self.draft)}")

    def start(self, seed: int) -> Router:
        return _Places(lambda block: self.draft)


class _Places(Router):
    """Drafts at some places, and accepts what was drafted."""

    def __init__(self, chosen: Any):
        super().__init__()
        self.chosen = chosen

    def drafts(self, block: int) -> bool:
        return self.chosen(block)


@dataclass(frozen=True)
class Stride:
    """The large model draws every `every`-th block, from block 0 on; nothing is scored (StrideAR).

    Raises:
        ValueError: for a number below 1.
    """

    every: int = 3
    scored = reference = False

    def __post_init__(self) -> None:
        if whole(self.every, 1) is None:
            raise ValueError(f"every must be a whole number of at least 1, got {shown(self.every)}")

    def start(self, seed: int) -> Router:
        return _Places(lambda block: block % self.every != 0)


@dataclass(frozen=True)
class Chance:
    """The small model draws a share of the blocks, by coins of the video's seed; nothing is scored.

    Raises:
        ValueError: for a share outside [0, 1].
    """

    acceptance: float = 0.7
    scored = reference = False

    def __post_init__(self) -> None:
        check_share(self.acceptance, "acceptance")

    def start(self, seed: int) -> Router:
        seeds = torch.tensor([seed])
        return _Places(lambda block: float(coins(seeds, torch.tensor([[block]]), Purpose.CHOICE)) < self.acceptance)


@dataclass(frozen=True)
class Replay:
    """Make each block by whom it was made before: the same video from the same seed, without scoring.

    Args:
        makers: by block, as `BlockStats.makers` has them; blocks behind them are the large model's.

    Raises:
        ValueError: for a maker that is none.
    """

    makers: tuple[str, ...] = ()
    scored = reference = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "makers", tuple(self.makers))
        unknown = [maker for maker in self.makers if maker not in MAKERS]
        if unknown:
            raise ValueError(f"makers must be of {', '.join(MAKERS)}, got {shown(unknown[0])}")

    def start(self, seed: int) -> Router:
        return _Replay(self.makers)


class _Replay(Router):
    def __init__(self, makers: tuple[str, ...]):
        super().__init__()
        self.makers = makers

    def _maker(self, block: int) -> str:
        return self.makers[block] if block < len(self.makers) else "target"

    def drafts(self, block: int) -> bool:
        return self._maker(block) != "target"

    def accepts(self, block: int, score: float | None) -> bool:
        return self._maker(block) == "draft"

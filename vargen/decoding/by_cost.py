"""The controller of draft lengths by measured cost: one for windows, chains and trees.

Shape suffixes: B images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vargen.decoding.cost import BESIDE


class Expectation(Protocol):
    """How many tokens a step commits, learned from the steps before."""

    def tokens(self, fed: int) -> float:
        """Of a step that feeds so many."""

    def promising(self, fed: int) -> float:
        """The same, were drafts accepted as often as is worth a try."""

    def observe(self, count: Tensor, active: Tensor, fed: int) -> None:
        """See the tokens committed `[B]`, which images are unfinished `[B]`, and what each was fed."""


@dataclass
class ByCost:
    """The controller of draft lengths: it feeds what commits most tokens a second.

    Where drafting does not pay, as in batches on few cores, one token is fed from there on, which is sequential decoding; where
    it would not even pay with promising acceptance, nothing is drafted at all. It reads committed counts, so it is for the CPU,
    or to be asked once.

    Args:
        seconds: of a step, by the tokens it feeds, drafting included; 1 is among them.
        expectation: of the tokens that a step commits.
        probes: first steps that draft whatever is expected.
        least: tokens that those feed at least.
        margin: how much better another length has to be: one that shrinks loses drafts that passes have refined.
    """

    seconds: Mapping[int, float]
    expectation: Expectation
    probes: int = 4
    least: int = 2
    margin: float = 1.0
    fed: int = 0

    def __post_init__(self) -> None:
        if max(self.seconds, key=lambda fed: self.rate(fed, self.expectation.promising(fed))) == 1:
            self.fed = 1

    def rate(self, fed: int, tokens: float) -> float:
        """Tokens a second."""
        return tokens / self.seconds[fed] * (BESIDE if fed > 1 else 1.0)

    def next(self) -> int:
        """What the next step feeds."""
        if self.fed == 1:
            return 1
        allowed = [fed for fed in self.seconds if fed >= self.least or self.probes <= 0] or list(self.seconds)
        self.probes -= 1
        rates = {fed: self.rate(fed, self.expectation.tokens(fed)) for fed in allowed}
        best = max(rates, key=lambda fed: rates[fed])
        if best == 1 or rates[best] > self.margin * rates.get(self.fed, 0.0):
            self.fed = best
        return self.fed

    def observe(self, count: Tensor, active: Tensor) -> None:
        """See the tokens that the last step committed, int64 `[B]`, and which images are unfinished, bool `[B]`."""
        if self.fed > 1 and count.device.type == "cpu" and active.any():
            self.expectation.observe(count, active, self.fed)


_GROWTH = 0.75
_TRUST = 8  # passes after which half of what sets a picture apart from its batch is taken for its own, not for chance


@dataclass
class Growth:
    """Of a Jacobi window W: 1 + s (W - 1)^0.75 tokens, with s from the last passes.

    On the packaged model with maximal coupling that fits windows of 4, 8, 16 and 24 (1.52, 1.92, 2.63 and 3.11 tokens) with one
    s. A batch takes as many passes as its slowest picture, so s is that picture's.

    Args:
        hoped: s that is worth probing for. memory: weight of the past in the running mean.
    """

    hoped: float
    memory: float
    mean: float = 0.2  # s, over the pictures
    passes: int = 0
    apart: Tensor | float = 0.0  # s of each picture less the mean, summed over the passes
    slowest: float = 0.0  # s of the slowest picture less the mean

    def tokens(self, fed: int) -> float:
        return 1 + (self.mean + self.slowest) * (fed - 1) ** _GROWTH

    def promising(self, fed: int) -> float:
        return 1 + self.hoped * (fed - 1) ** _GROWTH

    def observe(self, count: Tensor, active: Tensor, fed: int) -> None:
        seen = (count - 1) / (fed - 1) ** _GROWTH
        mean = seen[active].mean()
        self.mean = self.memory * self.mean + (1 - self.memory) * float(mean)
        self.passes += 1
        self.apart = apart = self.apart + torch.where(active, seen - mean, 0.0)
        self.slowest = float(apart[active].min()) / (self.passes + _TRUST)


_MEMORY = 0.9


@dataclass
class Geometric:
    """Of a chain of L drafts, each accepted with probability a: (1 - a^(L + 1)) / (1 - a) tokens (Leviathan et al. 2023,
    equation 1), with a from the last passes."""

    hoped: float = 0.8  # a that is worth probing for
    accepted: float = 3.0  # of `examined` drafts; starts at 0.6 with the weight of five drafts
    examined: float = 5.0

    def tokens(self, fed: int) -> float:
        return sum((self.accepted / self.examined) ** drafts for drafts in range(fed))

    def promising(self, fed: int) -> float:
        return sum(self.hoped**drafts for drafts in range(fed))

    def observe(self, count: Tensor, active: Tensor, fed: int) -> None:
        kept = (count[active] - 1).float()
        self.accepted = _MEMORY * self.accepted + float(kept.sum()) / max(len(kept), 1)
        self.examined = _MEMORY * self.examined + float((kept + 1).clamp(max=fed - 1).sum()) / max(len(kept), 1)

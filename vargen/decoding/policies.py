"""Which blocks of a video a small model draws, and which the large one, by a score of the drafts.

A policy is data. For each video it starts a router, which keeps what it has seen. Those that do not look at drafts are in
`vargen.decoding.placements`.

Sources: a threshold on a score is SDVG (Hu and Zhang 2026, arXiv:2604.17397). The others are variations: a threshold that
follows the video, or the clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from vargen.decoding.block_stats import BlockRow
from vargen.decoding.router import Router, check_share, check_threshold
from vargen.values import real, shown, whole

TAU = -0.7  # of the paper, on ImageReward's scale, whose scores of its training data have mean 0 and deviation 1


@dataclass(frozen=True)
class Threshold:
    """Accept a draft that scores `tau` at least.

    Raises:
        ValueError: for NaN. TypeError: for what is no number.
    """

    tau: float = TAU
    scored, reference = True, False

    def __post_init__(self) -> None:
        check_threshold(self.tau)

    def start(self, seed: int) -> Router:
        return Router(self.tau)


@dataclass(frozen=True)
class RelativeToFirst:
    """Accept a draft that scores at most `delta` less than block 0, which the large model draws: scores depend on the prompt
    more than on anything else, and this one is of the same prompt.

    Where block 0 could not be scored, nothing is accepted.

    Raises:
        ValueError: for NaN. TypeError: for what is no number.
    """

    delta: float = 0.5
    scored = reference = True

    def __post_init__(self) -> None:
        check_threshold(self.delta, "delta")

    def start(self, seed: int) -> Router:
        return _Relative(self.delta)


class _Relative(Router):
    def __init__(self, delta: float):
        super().__init__(math.inf)
        self.delta = delta

    def observe(self, row: BlockRow) -> None:
        if row.number == 0 and row.score is not None:
            self.tau = row.score - self.delta


@dataclass(frozen=True)
class RunningQuantile:
    """Accept a draft unless it is among the worst share `reject` of the latest `memory` drafts of this video, itself included.

    Raises:
        ValueError: for a share outside [0, 1], or a memory below 2.
    """

    reject: float = 0.3
    memory: int = 16
    scored, reference = True, False

    def __post_init__(self) -> None:
        check_share(self.reject, "reject")
        if whole(self.memory, 2) is None:
            raise ValueError(f"memory must be a whole number of at least 2, got {shown(self.memory)}")

    def start(self, seed: int) -> Router:
        return _Quantile(self.reject, self.memory)


class _Quantile(Router):
    def __init__(self, reject: float, memory: int):
        super().__init__()
        self.reject, self.seen = reject, deque[float](maxlen=memory)

    def accepts(self, block: int, score: float | None) -> bool:
        if score is None:
            return False
        self.seen.append(score)
        worst = math.floor(self.reject * len(self.seen))  # a draft among so many of the lowest is refused
        return worst == 0 or score > sorted(self.seen)[worst - 1]


@dataclass(frozen=True)
class Budget:
    """A threshold that is moved after each judged block, so that a share `acceptance` of drafts is accepted, or a block takes
    `seconds` in the mean: integral control, within bounds.

    With `seconds` the video depends on measured time, so it cannot be made again from its seed alone; see `Replay`.

    Args:
        tau: where it starts. gain: how far one block moves it. low, high: bounds.

    Raises:
        ValueError: unless one of `acceptance` and `seconds` is given, and the numbers are in order.
    """

    acceptance: float | None = 0.7
    seconds: float | None = None
    tau: float = TAU
    gain: float = 0.5
    low: float = -5.0
    high: float = 5.0
    scored, reference = True, False

    def __post_init__(self) -> None:
        if (self.acceptance is None) == (self.seconds is None):
            raise ValueError(f"give acceptance or seconds, got {shown(self.acceptance)} and {shown(self.seconds)}")
        if self.acceptance is not None:
            check_share(self.acceptance, "acceptance")
        for name in ("gain", *(("seconds",) if self.seconds is not None else ())):
            value = real(getattr(self, name))
            if value is None or value <= 0:
                raise ValueError(f"{name} must be a number above 0, got {shown(getattr(self, name))}")
        if not check_threshold(self.low, "low") <= check_threshold(self.tau) <= check_threshold(self.high, "high"):
            raise ValueError(f"tau must be from low to high, got {self.low}, {self.tau} and {self.high}")

    def start(self, seed: int) -> Router:
        return _Budget(self)


class _Budget(Router):
    def __init__(self, policy: Budget):
        super().__init__(policy.tau)
        self.policy, self.blocks, self.seconds = policy, 0, 0.0

    def observe(self, row: BlockRow) -> None:
        policy = self.policy
        self.blocks, self.seconds = self.blocks + 1, self.seconds + row.seconds
        if policy.seconds is not None:
            late = self.seconds / self.blocks / policy.seconds - 1
            error = -max(-1.0, min(1.0, late))
        elif row.verdict in ("accepted", "rejected") and policy.acceptance is not None:
            error = (row.verdict == "accepted") - policy.acceptance
        else:
            return
        assert self.tau is not None
        self.tau = min(policy.high, max(policy.low, self.tau + policy.gain * error))

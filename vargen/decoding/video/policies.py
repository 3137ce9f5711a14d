"""What a policy for video is: it starts a router for each video, which decides by block and keeps what it has seen."""

from __future__ import annotations

import math
import numbers
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from vargen.decoding.noise import Purpose, coins
from vargen.decoding.video.stats import MAKERS, BlockRecord
from vargen.values import parse_float, parse_int, short_repr


class Router:
    """What a policy decides in one video. By default: draft all blocks, and accept those that score `tau` at least.

    Attributes:
        tau: the threshold just now; None where none is used. May be set while the video is made.
    """

    def __init__(self, tau: float | None = None):
        self.tau = tau

    def drafts(self, block: int) -> bool:
        """Whether the small model is to propose this block."""
        return True

    def accepts(self, block: int, score: float | None) -> bool:
        """Whether a draft stands; `score` is finite, or None where the policy is not `scored`."""
        return self.tau is None or (score is not None and score >= self.tau)

    def observe(self, row: BlockRecord) -> None:
        """See a finished block."""


@runtime_checkable
class Policy(Protocol):
    """Starts routers.

    Attributes:
        scored: whether drafts must be scored. reference: whether block 0 must be, whoever made it.
    """

    @property
    def scored(self) -> bool: ...

    @property
    def reference(self) -> bool: ...

    def start(self, seed: int) -> Router: ...


def validate_threshold(value: Any, name: str = "tau") -> float:
    """A threshold as a float; infinite ones accept all or nothing.

    Raises:
        ValueError: for NaN. TypeError: for what is no number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {short_repr(value)}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number or infinite, got nan")
    return float(value)


def validate_share(value: Any, name: str) -> None:
    share = parse_float(value)
    if share is None or not 0 <= share <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {short_repr(value)}")


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
        validate_threshold(self.tau)

    def start(self, seed: int) -> Router:
        return Router(self.tau)


@dataclass(frozen=True)
class RelativeThreshold:
    """Accept a draft that scores at most `delta` less than block 0, which the large model draws: scores depend on the prompt
    more than on anything else, and this one is of the same prompt.

    Where block 0 could not be scored, nothing is accepted.

    Raises:
        ValueError: for NaN. TypeError: for what is no number.
    """

    delta: float = 0.5
    scored = reference = True

    def __post_init__(self) -> None:
        validate_threshold(self.delta, "delta")

    def start(self, seed: int) -> Router:
        return _Relative(self.delta)


class _Relative(Router):
    def __init__(self, delta: float):
        super().__init__(math.inf)
        self.delta = delta

    def observe(self, row: BlockRecord) -> None:
        if row.number == 0 and row.score is not None:
            self.tau = row.score - self.delta


@dataclass(frozen=True)
class QuantileThreshold:
    """Accept a draft unless it is among the worst share `reject` of the latest `memory` drafts of this video, itself included.

    Raises:
        ValueError: for a share outside [0, 1], or a memory below 2.
    """

    reject: float = 0.3
    memory: int = 16
    scored, reference = True, False

    def __post_init__(self) -> None:
        validate_share(self.reject, "reject")
        if parse_int(self.memory, 2) is None:
            raise ValueError(f"memory must be a whole number of at least 2, got {short_repr(self.memory)}")

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
class AdaptiveThreshold:
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
            raise ValueError(f"give acceptance or seconds, got {short_repr(self.acceptance)} and {short_repr(self.seconds)}")
        if self.acceptance is not None:
            validate_share(self.acceptance, "acceptance")
        for name in ("gain", *(("seconds",) if self.seconds is not None else ())):
            value = parse_float(getattr(self, name))
            if value is None or value <= 0:
                raise ValueError(f"{name} must be a number above 0, got {short_repr(getattr(self, name))}")
        if not validate_threshold(self.low, "low") <= validate_threshold(self.tau) <= validate_threshold(self.high, "high"):
            raise ValueError(f"tau must be from low to high, got {self.low}, {self.tau} and {self.high}")

    def start(self, seed: int) -> Router:
        return _Budget(self)


class _Budget(Router):
    def __init__(self, policy: AdaptiveThreshold):
        super().__init__(policy.tau)
        self.policy, self.blocks, self.seconds = policy, 0, 0.0

    def observe(self, row: BlockRecord) -> None:
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


@dataclass(frozen=True)
class SingleModel:
    """The large model draws all blocks, or the small one.

    Raises:
        TypeError: for a `draft` that is no truth value.
    """

    draft: bool = False
    scored = reference = False

    def __post_init__(self) -> None:
        if not isinstance(self.draft, bool):
            raise TypeError(f"draft must be True or False, got {short_repr(self.draft)}")

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
        if parse_int(self.every, 1) is None:
            raise ValueError(f"every must be a whole number of at least 1, got {short_repr(self.every)}")

    def start(self, seed: int) -> Router:
        return _Places(lambda block: block % self.every != 0)


@dataclass(frozen=True)
class RandomShare:
    """The small model draws a share of the blocks, by coins of the video's seed; nothing is scored.

    Raises:
        ValueError: for a share outside [0, 1].
    """

    acceptance: float = 0.7
    scored = reference = False

    def __post_init__(self) -> None:
        validate_share(self.acceptance, "acceptance")

    def start(self, seed: int) -> Router:
        seeds = torch.tensor([seed])
        return _Places(lambda block: float(coins(seeds, torch.tensor([[block]]), Purpose.CHOICE)) < self.acceptance)


@dataclass(frozen=True)
class Replay:
    """Make each block by whom it was made before: the same video from the same seed, without scoring.

    Args:
        makers: by block, as `VideoStats.makers` has them; blocks behind them are the large model's.

    Raises:
        ValueError: for a maker that is none.
    """

    makers: tuple[str, ...] = ()
    scored = reference = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "makers", tuple(self.makers))
        unknown = [maker for maker in self.makers if maker not in MAKERS]
        if unknown:
            raise ValueError(f"makers must be of {', '.join(MAKERS)}, got {short_repr(unknown[0])}")

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

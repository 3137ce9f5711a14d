"""Policies for video: a policy starts a router for each video, which decides block by block.

The router keeps what it has observed in that video.
"""

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
    """Decisions of a policy in one video. By default: draft all blocks, and accept those that score at least `tau`.

    Attributes:
        tau: the current threshold; None if none is used. May be set during generation.
    """

    def __init__(self, tau: float | None = None):
        self.tau = tau

    def drafts(self, block: int) -> bool:
        """Return whether the small model proposes this block."""
        return True

    def accepts(self, block: int, score: float | None) -> bool:
        """Return whether a draft is accepted; `score` is finite, or None if the policy is not `scored`."""
        return self.tau is None or (score is not None and score >= self.tau)

    def observe(self, row: BlockRecord) -> None:
        """Update the state with a finished block."""


@runtime_checkable
class Policy(Protocol):
    """Factory of routers.

    Attributes:
        scored: whether drafts must be scored.
        reference: whether block 0 must be scored, whichever model generated it.
    """

    @property
    def scored(self) -> bool: ...

    @property
    def reference(self) -> bool: ...

    def start(self, seed: int) -> Router: ...


def validate_threshold(value: Any, name: str = "tau") -> float:
    """Return a threshold as a float; infinite values accept all or nothing.

    Raises:
        ValueError: for NaN.
        TypeError: if it is not a number.
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


TAU = -0.7  # as in the paper, on the scale of ImageReward: mean 0, deviation 1 on its training data


@dataclass(frozen=True)
class Threshold:
    """Accept a draft that scores at least `tau`.

    Raises:
        ValueError: for NaN.
        TypeError: if it is not a number.
    """

    tau: float = TAU
    scored, reference = True, False

    def __post_init__(self) -> None:
        validate_threshold(self.tau)

    def start(self, seed: int) -> Router:
        return Router(self.tau)


@dataclass(frozen=True)
class RelativeThreshold:
    """Accept a draft that scores at most `delta` less than block 0, which the target generates.

    Scores depend on the prompt more than on anything else, and block 0 has the same prompt. If block 0 could not be scored, no
    draft is accepted.

    Raises:
        ValueError: for NaN.
        TypeError: if it is not a number.
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
    """Reject a draft if it is in the lowest fraction `reject` of the latest `memory` drafts of this video, itself included.

    Raises:
        ValueError: if the fraction is outside [0, 1], or the memory is below 2.
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
        worst = math.floor(self.reject * len(self.seen))  # number of lowest scores that are rejected
        return worst == 0 or score > sorted(self.seen)[worst - 1]


@dataclass(frozen=True)
class AdaptiveThreshold:
    """Integral control of the threshold, within bounds, toward an acceptance rate or a mean number of seconds per block.

    The threshold moves after each verified block toward the rate `acceptance` or, if `seconds` is given, that time per block.
    With `seconds` the video depends on measured time and cannot be reproduced from its seed alone; see `Replay`.

    Args:
        tau: initial value.
        gain: change per block.
        low, high: bounds.

    Raises:
        ValueError: unless exactly one of `acceptance` and `seconds` is given, and the numbers are in order.
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
    """Generate all blocks with the target, or all with the small model if `draft`.

    Raises:
        TypeError: if `draft` is not a bool.
    """

    draft: bool = False
    scored = reference = False

    def __post_init__(self) -> None:
        if not isinstance(self.draft, bool):
            raise TypeError(f"draft must be True or False, got {short_repr(self.draft)}")

    def start(self, seed: int) -> Router:
        return _Places(lambda block: self.draft)


class _Places(Router):
    """Draft selected blocks, and accept all drafts."""

    def __init__(self, chosen: Any):
        super().__init__()
        self.chosen = chosen

    def drafts(self, block: int) -> bool:
        return self.chosen(block)


@dataclass(frozen=True)
class Stride:
    """Generate every `every`-th block with the target, from block 0 on; nothing is scored (StrideAR).

    Raises:
        ValueError: if the number is below 1.
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
    """Generate a random fraction of blocks with the small model, determined by the video's seed; nothing is scored.

    Raises:
        ValueError: if the fraction is outside [0, 1].
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
    """Generate each block with the model that generated it before: the same video from the same seed, without scoring.

    Args:
        makers: by block, as in `VideoStats.makers`; the target generates all later blocks.

    Raises:
        ValueError: if a maker is unknown.
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

"""Policies for video: which blocks the small model drafts, and which drafts are accepted.

A policy is data. For each video it starts a `PolicyState`, which decides block by block and keeps what it has observed.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vargen.decoding.noise import Purpose, sample_uniform64
from vargen.decoding.video.stats import BLOCK_SOURCES, BlockRecord
from vargen.deprecation import renamed_fields
from vargen.values import parse_float, parse_int, short_repr


class PolicyState:
    """Decisions of a policy in one video. By default: draft all blocks, and accept those that score at least `tau`.

    Attributes:
        tau: the current threshold; None if none is used. May be set during generation.
    """

    def __init__(self, tau: float | None = None):
        self.tau = tau

    def should_draft(self, block: int) -> bool:
        """Return whether the small model proposes this block."""
        return True

    def should_accept(self, block: int, score: float | None) -> bool:
        """Return whether a draft is accepted; `score` is finite, or None if the policy does not need scores."""
        return self.tau is None or (score is not None and score >= self.tau)

    def observe(self, record: BlockRecord) -> None:
        """Update the state with a finished block."""


class Policy(ABC):
    """Base class of policies. Constructors raise ValueError or TypeError for a value that is not allowed, and name it.

    Attributes:
        needs_scores: whether drafts must be scored. needs_router: whether a trained router must rank them.
        needs_reference_score: whether block 0 must be scored, whichever model generated it.
    """

    needs_scores: ClassVar[bool] = False
    needs_router: ClassVar[bool] = False
    needs_reference_score: ClassVar[bool] = False

    @abstractmethod
    def start(self, seed: int) -> PolicyState: ...


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


DEFAULT_THRESHOLD = -0.7  # as in the paper, on the scale of ImageReward: mean 0, deviation 1 on its training data


@dataclass(frozen=True)
class Threshold(Policy):
    """Accept a draft that scores at least `tau`."""

    tau: float = DEFAULT_THRESHOLD
    needs_scores = True

    def __post_init__(self) -> None:
        validate_threshold(self.tau)

    def start(self, seed: int) -> PolicyState:
        return PolicyState(self.tau)


@dataclass(frozen=True)
class RelativeThreshold(Policy):
    """Accept a draft that scores at most `delta` less than block 0, which the target generates.

    Scores depend on the prompt more than on anything else, and block 0 has the same prompt. If block 0 could not be scored, no
    draft is accepted.
    """

    delta: float = 0.5
    needs_scores = needs_reference_score = True

    def __post_init__(self) -> None:
        validate_threshold(self.delta, "delta")

    def start(self, seed: int) -> PolicyState:
        return _RelativeState(self.delta)


class _RelativeState(PolicyState):
    def __init__(self, delta: float):
        super().__init__(math.inf)
        self.delta = delta

    def observe(self, record: BlockRecord) -> None:
        if record.number == 0 and record.score is not None:
            self.tau = record.score - self.delta


@dataclass(frozen=True)
class QuantileThreshold(Policy):
    """Reject a draft if it is in the lowest fraction `reject` of the latest `memory` drafts of this video, itself included."""

    reject: float = 0.3
    memory: int = 16
    needs_scores = True

    def __post_init__(self) -> None:
        validate_share(self.reject, "reject")
        if parse_int(self.memory, 2) is None:
            raise ValueError(f"memory must be a whole number of at least 2, got {short_repr(self.memory)}")

    def start(self, seed: int) -> PolicyState:
        return _QuantileState(self.reject, self.memory)


class _QuantileState(PolicyState):
    def __init__(self, reject: float, memory: int):
        super().__init__()
        self.reject, self.recent = reject, deque[float](maxlen=memory)

    def should_accept(self, block: int, score: float | None) -> bool:
        if score is None:
            return False
        self.recent.append(score)
        num_rejected = math.floor(self.reject * len(self.recent))
        return num_rejected == 0 or score > sorted(self.recent)[num_rejected - 1]


@dataclass(frozen=True)
class AdaptiveThreshold(Policy):
    """Integral control of the threshold, within bounds, toward an acceptance rate or a mean number of seconds per block.

    The threshold moves after each verified block toward the rate `acceptance` or, if `seconds` is given, that time per block.
    With `seconds` the video depends on measured time and cannot be reproduced from its seed alone; see `Replay`.

    Args:
        tau: initial value.
        gain: change per block.
        low, high: bounds.
    """

    acceptance: float | None = 0.7
    seconds: float | None = None
    tau: float = DEFAULT_THRESHOLD
    gain: float = 0.5
    low: float = -5.0
    high: float = 5.0
    needs_scores = True

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

    def start(self, seed: int) -> PolicyState:
        return _AdaptiveState(self)


class _AdaptiveState(PolicyState):
    def __init__(self, policy: AdaptiveThreshold):
        super().__init__(policy.tau)
        self.policy, self.blocks, self.seconds = policy, 0, 0.0

    def observe(self, record: BlockRecord) -> None:
        policy = self.policy
        self.blocks, self.seconds = self.blocks + 1, self.seconds + record.seconds
        if policy.seconds is not None:
            late = self.seconds / self.blocks / policy.seconds - 1
            error = -max(-1.0, min(1.0, late))
        elif record.outcome in ("accepted", "rejected") and policy.acceptance is not None:
            error = (record.outcome == "accepted") - policy.acceptance
        else:
            return
        assert self.tau is not None
        self.tau = min(policy.high, max(policy.low, self.tau + policy.gain * error))


class _PlacementState(PolicyState):
    """Draft selected blocks, and accept all drafts."""

    def __init__(self, should_draft: Callable[[int], bool]):
        super().__init__()
        self._should_draft = should_draft

    def should_draft(self, block: int) -> bool:
        return self._should_draft(block)


@dataclass(frozen=True)
class SingleModel(Policy):
    """Generate all blocks with the target, or all with the small model if `draft`."""

    draft: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.draft, bool):
            raise TypeError(f"draft must be True or False, got {short_repr(self.draft)}")

    def start(self, seed: int) -> PolicyState:
        return _PlacementState(lambda block: self.draft)


@dataclass(frozen=True)
class Stride(Policy):
    """Generate every `every`-th block with the target, from block 0 on; nothing is scored (StrideAR)."""

    every: int = 3

    def __post_init__(self) -> None:
        if parse_int(self.every, 1) is None:
            raise ValueError(f"every must be a whole number of at least 1, got {short_repr(self.every)}")

    def start(self, seed: int) -> PolicyState:
        return _PlacementState(lambda block: block % self.every != 0)


@dataclass(frozen=True)
class RandomShare(Policy):
    """Generate a random fraction of blocks with the small model, determined by the video's seed; nothing is scored."""

    acceptance: float = 0.7

    def __post_init__(self) -> None:
        validate_share(self.acceptance, "acceptance")

    def start(self, seed: int) -> PolicyState:
        seeds = torch.tensor([seed])
        return _PlacementState(
            lambda block: float(sample_uniform64(seeds, torch.tensor([[block]]), Purpose.CHOICE)) < self.acceptance
        )


@renamed_fields(makers="sources")
@dataclass(frozen=True)
class Replay(Policy):
    """Generate each block as it was generated before: the same video from the same seed, without scoring.

    Args:
        sources: by block, as in `VideoStats.sources`; the target generates all later blocks.
    """

    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        for source in self.sources:
            if source not in BLOCK_SOURCES:
                raise ValueError(f"sources must be of {', '.join(BLOCK_SOURCES)}, got {short_repr(source)}")

    def start(self, seed: int) -> PolicyState:
        return _ReplayState(self.sources)


class _ReplayState(PolicyState):
    def __init__(self, sources: tuple[str, ...]):
        super().__init__()
        self.sources = dict(enumerate(sources))

    def should_draft(self, block: int) -> bool:
        return self.sources.get(block, "target") != "target"

    def should_accept(self, block: int, score: float | None) -> bool:
        return self.sources.get(block) == "draft"

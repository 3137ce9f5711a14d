"""Policies for video: which blocks the small model drafts, and which drafts are accepted.

A policy is data. For each video it starts a `PolicyState`, which decides block by block and keeps what it has observed.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from vargen.decoding.video.stats import BlockRecord
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
    """

    needs_scores: ClassVar[bool] = False
    needs_router: ClassVar[bool] = False

    @abstractmethod
    def start(self, seed: int) -> PolicyState: ...


def validate_threshold(value: Any, name: str = "tau") -> float:
    """Return a threshold as a float; infinite values accept all or nothing."""
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

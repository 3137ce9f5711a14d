"""What a policy for video is: it starts a router for each video, which decides by block and keeps what it has seen."""

from __future__ import annotations

import math
import numbers
from typing import Any, Protocol, runtime_checkable

from vargen.decoding.block_stats import BlockRow
from vargen.values import real, shown


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

    def observe(self, row: BlockRow) -> None:
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


def check_threshold(value: Any, name: str = "tau") -> float:
    """A threshold as a float; infinite ones accept all or nothing.

    Raises:
        ValueError: for NaN. TypeError: for what is no number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number or infinite, got nan")
    return float(value)


def check_share(value: Any, name: str) -> None:
    share = real(value)
    if share is None or not 0 <= share <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {shown(value)}")

"""From scores of the frames of a block to one number: what a policy compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vargen.values import real, shown

Aggregator = Callable[[Tensor], float]  # of float32 [T], finite


def lowest(scores_T: Tensor) -> float:
    """The worst frame decides (SDVG, arXiv:2604.17397): one broken frame is seen."""
    return float(scores_T.min())


def mean(scores_T: Tensor) -> float:
    """The mean over frames."""
    return float(scores_T.mean())


def last(scores_T: Tensor) -> float:
    """The last frame, which the next block goes on from."""
    return float(scores_T[-1])


@dataclass(frozen=True)
class LowerQuantile:
    """A low quantile over frames: as `lowest`, but blocks of more frames are not judged more harshly.

    Raises:
        ValueError: for a share outside [0, 1].
    """

    share: float = 0.25

    def __post_init__(self) -> None:
        value = real(self.share)
        if value is None or not 0 <= value <= 1:
            raise ValueError(f"share must be from 0 to 1, got {shown(self.share)}")

    def __call__(self, scores_T: Tensor) -> float:
        return float(scores_T.quantile(self.share))

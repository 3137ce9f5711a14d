"""Latents to frames, block by block, where a block may be taken back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vargen.values import parse_float, short_repr


class BlockDecoder(Protocol):
    """Latents to pixels in [-1, 1], block by block; a state is never changed, so that a block can be taken back."""

    def decode_block(self, latents: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Pixels `[1, F', 3, Y, X]` of the next latents, and the state behind them; None stands for the start of a video."""


class DecodedBlock(NamedTuple):
    frames: Tensor  # float32 [T, 3, Y, X] in [0, 1]
    state: Any


class BlockPixels:
    """A decoder in one video: where it is, and the last frame that it made of a block that stands."""

    def __init__(self, decoder: BlockDecoder):
        self.decoder, self.state = decoder, None
        self.last: Tensor | None = None
        self._latest: tuple[Tensor, DecodedBlock] | None = None

    def decoded(self, latents: Tensor) -> DecodedBlock:
        """The next block. What was decoded to be scored is not decoded again to be kept."""
        if self._latest is None or self._latest[0] is not latents:
            pixels, state = self.decoder.decode_block(latents, self.state)
            self._latest = latents, DecodedBlock((pixels[0].float() / 2 + 0.5).clamp(0, 1), state)
        return self._latest[1]

    def keep(self, latents: Tensor) -> Tensor:
        """The block stands; its frames."""
        frames, self.state = self.decoded(latents)
        self.last, self._latest = frames[-1].clone(), None
        return frames


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
        value = parse_float(self.share)
        if value is None or not 0 <= value <= 1:
            raise ValueError(f"share must be from 0 to 1, got {short_repr(self.share)}")

    def __call__(self, scores_T: Tensor) -> float:
        return float(scores_T.quantile(self.share))


class View(NamedTuple):
    """What a scorer sees of a block.

    Attributes:
        number: of the block. latents: float `[F, C, Y, X]`.
        frames: float32 `[T, 3, Y, X]` in [0, 1]; with a preview decoder, its frames.
        previous: the frame before them, `[3, Y, X]`, by the same decoder; None at the start of a video.
    """

    number: int
    latents: Tensor
    frames: Tensor
    previous: Tensor | None


Score = Callable[[View], Tensor]  # scores [T] of the frames, or of anything: they are aggregated


class Scored(NamedTuple):
    """What became of scoring a block.

    Attributes:
        score: finite; None where there is none. by_frame: what the scorer gave. trouble: what went wrong, in words.
    """

    score: float | None
    by_frame: list[float]
    trouble: str | None = None


def scored(score: Score, aggregate: Aggregator, view: View) -> Scored:
    """Score a block. What the scorer raises, or a number that is not finite, is told and not raised."""
    try:
        scores = torch.as_tensor(score(view)).detach().float().reshape(-1).cpu()
        if not scores.numel() or not scores.isfinite().all():
            return Scored(None, [], f"the scorer gave {short_repr(scores.tolist())}, not finite numbers")
        value = float(aggregate(scores))
    except Exception as error:  # someone else's code: the block is the target's then, and the row says so
        return Scored(None, [], f"the scorer raised {type(error).__name__}: {error}")
    if not math.isfinite(value):
        return Scored(None, scores.tolist(), f"aggregating the scores gave {value}")
    return Scored(value, scores.tolist())

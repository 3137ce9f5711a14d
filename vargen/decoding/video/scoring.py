"""Decoding of video blocks to frames and their scoring, where a block may be discarded again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vargen.values import parse_float, short_repr


class BlockDecoder(Protocol):
    """Decodes latents to pixels in [-1, 1], block by block. States are immutable, so that a block can be discarded."""

    def decode_block(self, latents: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return the pixels `[1, F', 3, Y, X]` of the next latents and the state after them; state None starts a video."""


class DecodedBlock(NamedTuple):
    frames: Tensor  # float32 [T, 3, Y, X] in [0, 1]
    state: Any


class BlockPixels:
    """The decoder of one video: its state, and the last frame of the last accepted block."""

    def __init__(self, decoder: BlockDecoder):
        self.decoder, self.state = decoder, None
        self.last: Tensor | None = None
        self._latest: tuple[Tensor, DecodedBlock] | None = None

    def decoded(self, latents: Tensor) -> DecodedBlock:
        """Decode the next block.

        The result is cached, so that a block decoded for scoring is not decoded again when it is kept.
        """
        if self._latest is None or self._latest[0] is not latents:
            pixels, state = self.decoder.decode_block(latents, self.state)
            self._latest = latents, DecodedBlock((pixels[0].float() / 2 + 0.5).clamp(0, 1), state)
        return self._latest[1]

    def keep(self, latents: Tensor) -> Tensor:
        """Advance past the block and return its frames."""
        frames, self.state = self.decoded(latents)
        self.last, self._latest = frames[-1].clone(), None
        return frames


Aggregator = Callable[[Tensor], float]  # of float32 [T], finite


def lowest(scores_T: Tensor) -> float:
    """Minimum over frames (SDVG, arXiv:2604.17397): a single broken frame is visible."""
    return float(scores_T.min())


def mean(scores_T: Tensor) -> float:
    """Mean over frames."""
    return float(scores_T.mean())


def last(scores_T: Tensor) -> float:
    """Score of the last frame, from which the next block continues."""
    return float(scores_T[-1])


@dataclass(frozen=True)
class LowerQuantile:
    """A low quantile over frames. Like `lowest`, but not stricter for blocks with more frames.

    Raises:
        ValueError: if `share` is outside [0, 1].
    """

    share: float = 0.25

    def __post_init__(self) -> None:
        value = parse_float(self.share)
        if value is None or not 0 <= value <= 1:
            raise ValueError(f"share must be from 0 to 1, got {short_repr(self.share)}")

    def __call__(self, scores_T: Tensor) -> float:
        return float(scores_T.quantile(self.share))


class View(NamedTuple):
    """Input of a scorer for one block.

    Attributes:
        number: index of the block.
        latents: float `[F, C, Y, X]`.
        frames: float32 `[T, 3, Y, X]` in [0, 1], from the preview decoder if there is one.
        previous: the frame before them from the same decoder, `[3, Y, X]`; None at the start of a video.
    """

    number: int
    latents: Tensor
    frames: Tensor
    previous: Tensor | None


Score = Callable[[View], Tensor]  # scores [T], one per frame or otherwise; they are aggregated


class Scored(NamedTuple):
    """Result of scoring a block.

    Attributes:
        score: finite; None if scoring failed.
        by_frame: output of the scorer.
        trouble: error message, if scoring failed.
    """

    score: float | None
    by_frame: list[float]
    trouble: str | None = None


def scored(score: Score, aggregate: Aggregator, view: View) -> Scored:
    """Score a block. Exceptions of the scorer and non-finite scores are reported in the result, not raised."""
    try:
        scores = torch.as_tensor(score(view)).detach().float().reshape(-1).cpu()
        if not scores.numel() or not scores.isfinite().all():
            return Scored(None, [], f"the scorer gave {short_repr(scores.tolist())}, not finite numbers")
        value = float(aggregate(scores))
    except Exception as error:  # user code: the target generates this block, and its record reports the error
        return Scored(None, [], f"the scorer raised {type(error).__name__}: {error}")
    if not math.isfinite(value):
        return Scored(None, scores.tolist(), f"aggregating the scores gave {value}")
    return Scored(value, scores.tolist())

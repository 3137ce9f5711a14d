"""Decoding of video blocks to frames and their scoring, where a block may be discarded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vargen.values import short_repr


class BlockDecoder(Protocol):
    """Decodes latents to pixels in [-1, 1], block by block. States are immutable, so that a block can be discarded."""

    def decode_block(self, latents: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return the pixels `[1, F', 3, Y, X]` of the next latents and the state after them; state None starts a video."""


class BlockFrames(NamedTuple):
    frames: Tensor  # float32 [T, 3, Y, X] in [0, 1]
    state: Any


class BlockDecoderState:
    """The decoder of one video: its state, and the last frame of the last accepted block."""

    def __init__(self, decoder: BlockDecoder):
        self.decoder, self.state = decoder, None
        self.last_frame: Tensor | None = None
        self._latest: tuple[Tensor, BlockFrames] | None = None

    def decode(self, latents: Tensor) -> BlockFrames:
        """Decode the next block.

        The result is cached, so that a block decoded for scoring is not decoded again when it is accepted.
        """
        if self._latest is None or self._latest[0] is not latents:
            self.discard()
            pixels, state = self.decoder.decode_block(latents, self.state)
            self._latest = latents, BlockFrames((pixels[0].float() / 2 + 0.5).clamp(0, 1), state)
        return self._latest[1]

    def discard(self) -> None:
        """Free the result for a block that was not accepted."""
        self._latest = None

    def accept(self, latents: Tensor) -> Tensor:
        """Advance past the block and return its frames."""
        frames, self.state = self.decode(latents)
        self.last_frame, self._latest = frames[-1].clone(), None
        return frames


class BlockView(NamedTuple):
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


BlockScorer = Callable[[BlockView], Tensor]  # scores [T], one per frame or otherwise; the smallest counts


class ScoreResult(NamedTuple):
    """Result of scoring a block.

    Attributes:
        score: finite; None if scoring failed.
        frame_scores: output of the scorer.
        failure: error message, if scoring failed.
    """

    score: float | None
    frame_scores: list[float]
    failure: str | None = None


def score_block(scorer: BlockScorer, view: BlockView) -> ScoreResult:
    """Score a block by its worst frame, because a single broken one is visible (SDVG, arXiv:2604.17397).

    Exceptions of the scorer and non-finite scores are reported in the result, not raised.
    """
    try:
        scores = torch.as_tensor(scorer(view)).detach().float().reshape(-1).cpu()
        if not scores.numel() or not scores.isfinite().all():
            return ScoreResult(None, [], f"the scorer returned {short_repr(scores.tolist())}, not finite numbers")
    except Exception as error:  # user code: the target generates this block, and its record reports the error
        return ScoreResult(None, [], f"the scorer raised {type(error).__name__}: {error}")
    return ScoreResult(float(scores.min()), scores.tolist())

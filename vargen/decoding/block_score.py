"""A scorer of blocks, and what it may get wrong: whatever it raises or gives, the loop goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vargen.decoding.aggregators import Aggregator
from vargen.values import shown


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
            return Scored(None, [], f"the scorer gave {shown(scores.tolist())}, not finite numbers")
        value = float(aggregate(scores))
    except Exception as error:  # someone else's code: the block is the target's then, and the row says so
        return Scored(None, [], f"the scorer raised {type(error).__name__}: {error}")
    if not math.isfinite(value):
        return Scored(None, scores.tolist(), f"aggregating the scores gave {value}")
    return Scored(value, scores.tolist())

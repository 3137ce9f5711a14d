"""Frame scores of a block of video: of an image scorer, minus a penalty for a jump at the boundary.

The first frame of a block pays for the amount by which its change from the previous frame exceeds the largest within the block.

Shape suffixes: T frames, Y/X rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vargen.scoring.protocol import Scorer, score_images, to_scorer
from vargen.values import NumberRange, require_int


def jump(frames_TCYX: Tensor, previous_CYX: Tensor | None) -> float:
    """Return how much the change into a block exceeds the largest within: mean difference in [0, 1]."""
    if previous_CYX is None:
        return 0.0
    into = float((frames_TCYX[0] - previous_CYX).abs().mean())
    within = frames_TCYX.diff(dim=0).abs().mean((1, 2, 3))
    return max(0.0, into - (float(within.max()) if len(within) else 0.0))


class FrameScorer:
    """Scores blocks of video with an image scorer.

    Args:
        scorer: a `Scorer`, or a function of images and prompts.
        step_weight: penalty of the first frame for a jump over the whole range of brightness; 0 ignores jumps.
        frames: number of a block's frames to score, evenly spaced up to the last one; None: all. Jumps count all frames.
    """

    def __init__(self, scorer: Scorer | Callable[..., Any], step_weight: float = 20.0, frames: int | None = None):
        self.scorer = to_scorer(scorer)
        self.step_weight: Any = NumberRange(0.0).check("step_weight", step_weight)
        self.frames = None if frames is None else require_int("frames", frames, 1)
        self.name = self.scorer.name

    def bind(self, prompt: str) -> Callable[[Any], Tensor]:
        """Return a function of a `BlockView` of one prompt: scores, float32 `[T]` or `[frames]`."""

        def scores(view: Any) -> Tensor:
            count = len(view.frames)
            looked = count if self.frames is None else min(self.frames, count)
            chosen = view.frames[[(k + 1) * count // looked - 1 for k in range(looked)]]
            found = score_images(self.scorer, chosen, [prompt] * looked)
            found = found if self.scorer.higher_is_better else -found
            cost = torch.zeros(len(found))
            cost[0] = self.step_weight * jump(view.frames, view.previous) if self.step_weight else 0.0
            return found - cost

        return scores

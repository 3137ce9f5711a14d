"""Automatic windows: how many tokens a pass feeds, selected by measured pass costs and recent acceptance.

Longer drafts commit more tokens per pass but make the pass slower; the best length depends on model, batch and machine.

Shape suffixes: B images.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MAX_AUTO_WIDTH = 32  # largest automatic window
DRAFTING_EFFICIENCY = 0.9  # fraction of a drafting step spent in passes; verifying and resampling take the rest
_EXPONENT = 0.75
_DECAY = 0.9  # weight of the past in the running acceptance
_WARMUP_PASSES = 4  # first passes, which always draft, to measure acceptance
_MIN_WARMUP_WIDTH = 4  # tokens that they feed at least
_OPTIMISTIC_RATE = 0.4  # s at which a trial is worthwhile: twice the typical one
_SHRINKAGE_PASSES = 8  # passes after which half of an image's deviation from its batch counts as its own, not as noise
_SWITCH_MARGIN = 1.1  # switching to a smaller window discards draft tokens that earlier passes have refined


class WidthController:
    """Selects the number of tokens per pass that maximizes tokens per second.

    A pass over a Jacobi window W commits about 1 + s (W - 1)^0.75 tokens. On the packaged model with maximal coupling, a single
    s fits windows of 4, 8, 16 and 24 (1.52, 1.92, 2.63 and 3.11 tokens). It is learned from the last passes. A batch needs as
    many passes as its slowest image, so s of that image is used.

    If width 1 wins, as for batches on few cores, drafting stops for the rest of the run, which is then plain autoregressive
    decoding. If width 1 wins even at an optimistic s, drafting never starts.

    The selection depends on timing and on the batch, so two runs may feed different widths: the distribution of the images is
    unchanged, and with the rule `shared_noise` so are the images themselves. With other rules, use a fixed window for
    reproducible images. On a GPU, `MAX_AUTO_WIDTH` tokens are always fed: another shape would require synchronization.

    Args:
        seconds_by_width: of a step, by the number of tokens it feeds, including width 1.
        warmup_passes: number of first passes that always draft, to measure acceptance.

    Attributes:
        width: of the last step; 1 once drafting has stopped.
        rate: s, over the images.
    """

    def __init__(self, seconds_by_width: Mapping[int, float], warmup_passes: int = _WARMUP_PASSES):
        self.seconds_by_width = seconds_by_width
        self.rate, self.width = 0.2, 0
        self._warmup, self._observed = warmup_passes, 0
        self._row_offsets: Tensor | float = 0.0  # s of each image minus the mean, summed over the passes
        self._slowest_offset = 0.0
        if self._best_width(list(seconds_by_width), _OPTIMISTIC_RATE) == 1:
            self.width = 1

    def choose(self) -> int:
        """Return the number of tokens that the next step feeds."""
        if self.width == 1:
            return 1
        widths = list(self.seconds_by_width)
        if self._warmup > 0:
            widths = [width for width in widths if width >= _MIN_WARMUP_WIDTH] or widths
        self._warmup -= 1
        rate = self.rate + self._slowest_offset
        best = self._best_width(widths, rate)
        now = self._tokens_per_second(self.width, rate) if self.width in widths else 0.0
        if best == 1 or self._tokens_per_second(best, rate) > _SWITCH_MARGIN * now:
            self.width = best
        return self.width

    def observe(self, num_committed: Tensor, active: Tensor) -> None:
        """Learn from the tokens committed by the last step, int64 `[B]`, of the images that are unfinished, bool `[B]`."""
        if self.width <= 1 or not active.any():
            return
        rates = (num_committed - 1) / (self.width - 1) ** _EXPONENT
        mean = rates[active].mean()
        self.rate = _DECAY * self.rate + (1 - _DECAY) * float(mean)
        self._observed += 1
        self._row_offsets = offsets = self._row_offsets + torch.where(active, rates - mean, 0.0)
        self._slowest_offset = float(offsets[active].min()) / (self._observed + _SHRINKAGE_PASSES)

    def _best_width(self, widths: list[int], rate: float) -> int:
        return max(widths, key=lambda width: self._tokens_per_second(width, rate))

    def _tokens_per_second(self, width: int, rate: float) -> float:
        tokens = 1 + rate * (width - 1) ** _EXPONENT
        return tokens / self.seconds_by_width[width] * (DRAFTING_EFFICIENCY if width > 1 else 1.0)

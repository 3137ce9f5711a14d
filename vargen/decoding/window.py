"""Draft length: how many tokens a pass feeds. Fixed, or selected by measured pass costs and recent acceptance.

Longer drafts commit more tokens per pass but make the pass slower; the best length depends on model, batch and machine.

Shape suffixes: B images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.costs import candidate_widths, measure_pass_costs
from vargen.decoding.interfaces import TokenModel
from vargen.values import number_field, parse_int, short_repr, suggest_names, validate_fields

MAX_WINDOW = 4096  # larger than any grid


@dataclass(frozen=True)
class AutoWindow:
    """Feed the number of tokens that maximizes tokens per second, from measured pass costs and recent acceptance.

    See `WidthController`. The selection depends on timing and on the batch, so two runs may feed different widths: the
    distribution of the images is unchanged, and with the rule `shared_noise` so are the images themselves. With other rules,
    use a fixed window for reproducible images. On a GPU it always feeds `max_width`, because a changing shape would require
    synchronization.

    Args:
        max_width: maximum number of tokens fed, at least 2.
        ema_decay: weight of the past in the running acceptance, from 0 to 0.999.
        warmup_passes: number of first passes that always draft, to measure acceptance.
        optimistic_rate: s of `WidthController` at which a trial is worthwhile, above 0; 0.2 is typical, 0.4 twice that.
    """

    max_width: int = number_field(32, 2, MAX_WINDOW, is_integer=True)
    ema_decay: float = number_field(0.9, 0, 0.999)
    warmup_passes: int = number_field(4, 0, is_integer=True)
    optimistic_rate: float = number_field(0.4, 0, open_below=True)

    def __post_init__(self) -> None:
        validate_fields(self)

    def fit_to_grid(self, tokens: int) -> AutoWindow:
        """Return the window with at most `tokens` tokens."""
        return replace(self, max_width=max(2, min(self.max_width, tokens)))

    def start(self, model: TokenModel, condition: Any, slots: int) -> WidthController | None:
        """Return what selects the width of each pass over B slots; None: always `max_width`."""
        if model.device.type != "cpu":
            return None
        return WidthController(measure_pass_costs(model, condition, slots, candidate_widths(self.max_width)), self)


WINDOWS: dict[str, AutoWindow] = {"auto": AutoWindow()}


def parse_window(value: int | str | AutoWindow) -> int | AutoWindow:
    """Return the window for a number or a name."""
    if isinstance(value, str):
        if value not in WINDOWS:
            raise ValueError(
                f"unknown window {short_repr(value)}; {suggest_names(value, WINDOWS)}, or give a whole number of at least 2"
            )
        return WINDOWS[value]
    if isinstance(value, Integral) and not isinstance(value, bool):
        width = parse_int(value, 2)
        if width is None:
            raise ValueError(f"window must be at least 2 (one committed token and one draft), got {short_repr(value)}")
        return width
    if isinstance(value, AutoWindow):
        return value
    raise TypeError(f"window must be a whole number, 'auto' or an AutoWindow, got {short_repr(value)}")


DRAFTING_EFFICIENCY = 0.9  # fraction of a drafting step spent in passes; verifying and resampling take the rest
_EXPONENT = 0.75
_SHRINKAGE_PASSES = 8  # passes after which half of an image's deviation from its batch counts as its own, not as noise
_MIN_WARMUP_WIDTH = 4  # tokens that the first steps feed at least
_SWITCH_MARGIN = 1.1  # switching to a smaller window discards draft tokens that earlier passes have refined


class WidthController:
    """Selects the number of tokens per pass that maximizes tokens per second.

    A pass over a Jacobi window W commits about 1 + s (W - 1)^0.75 tokens. On the packaged model with maximal coupling, a single
    s fits windows of 4, 8, 16 and 24 (1.52, 1.92, 2.63 and 3.11 tokens). It is learned from the last passes. A batch needs as
    many passes as its slowest image, so s of that image is used.

    If width 1 wins, as for batches on few cores, drafting stops for the rest of the run, which is then plain autoregressive
    decoding. If width 1 wins even at an optimistic s, drafting never starts.

    Args:
        seconds_by_width: of a step, by the number of tokens it feeds, including width 1.
        window: how s is learned.

    Attributes:
        width: of the last step; 1 once drafting has stopped.
        rate: s, over the images.
    """

    def __init__(self, seconds_by_width: Mapping[int, float], window: AutoWindow):
        self.seconds_by_width, self.window = seconds_by_width, window
        self.rate, self.width = 0.2, 0
        self._warmup, self._observed = window.warmup_passes, 0
        self._row_offsets: Tensor | float = 0.0  # s of each image minus the mean, summed over the passes
        self._slowest_offset = 0.0
        if self._best_width(list(seconds_by_width), window.optimistic_rate) == 1:
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
        mean, decay = rates[active].mean(), self.window.ema_decay
        self.rate = decay * self.rate + (1 - decay) * float(mean)
        self._observed += 1
        self._row_offsets = offsets = self._row_offsets + torch.where(active, rates - mean, 0.0)
        self._slowest_offset = float(offsets[active].min()) / (self._observed + _SHRINKAGE_PASSES)

    def _best_width(self, widths: list[int], rate: float) -> int:
        return max(widths, key=lambda width: self._tokens_per_second(width, rate))

    def _tokens_per_second(self, width: int, rate: float) -> float:
        tokens = 1 + rate * (width - 1) ** _EXPONENT
        return tokens / self.seconds_by_width[width] * (DRAFTING_EFFICIENCY if width > 1 else 1.0)

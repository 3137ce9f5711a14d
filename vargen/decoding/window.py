"""Draft length: how many tokens a pass feeds. Fixed, or selected by measured pass costs and recent acceptance.

Longer drafts commit more tokens per pass but make the pass slower; the best length depends on model, batch and machine.

Shape suffixes: B images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor

from vargen.decoding.costs import DRAFTING_EFFICIENCY, candidate_widths, measure_pass_costs
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
        optimistic_rate: acceptance at which a trial is worthwhile, above 0; 0.2 is typical, 0.4 twice that. See
            `PowerLawEstimate`.
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
        seconds = measure_pass_costs(model, condition, slots, candidate_widths(self.max_width))
        estimate = PowerLawEstimate(self.optimistic_rate, self.ema_decay)
        return WidthController(seconds, estimate, self.warmup_passes, 4, switch_margin=1.1)


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


class AcceptanceEstimate(Protocol):
    """Estimate of the number of tokens that a step commits, learned from earlier steps."""

    def expected_tokens(self, width: int) -> float:
        """Expected tokens of a step that feeds `width` tokens."""

    def optimistic_tokens(self, width: int) -> float:
        """Expected tokens at the acceptance at which a trial is worthwhile."""

    def observe(self, num_committed: Tensor, active: Tensor, width: int) -> None:
        """Update with the tokens committed `[B]`, which images are unfinished `[B]`, and the number of tokens fed to each."""


@dataclass
class WidthController:
    """Select the number of tokens per pass that maximizes tokens per second.

    The rate of a width is its expected number of committed tokens divided by its measured seconds. If width 1 wins, as for
    batches on few cores, drafting stops for the rest of the run, which is then plain autoregressive decoding. If width 1 wins
    even at an optimistic acceptance rate, drafting never starts.

    The controller reads committed counts on the host. On a GPU it must therefore be asked only once, before the first pass.

    Args:
        seconds_by_width: of a step, by the number of tokens it feeds, including drafting and including width 1.
        estimate: of the tokens that a step commits.
        warmup_passes: number of first steps that draft whatever the estimate.
        min_warmup_width: minimum number of tokens that those steps feed.
        switch_margin: factor by which another width must be faster before switching. Switching to a smaller window discards
            draft tokens that earlier passes have refined.
        width: of the last step; 1 once drafting has stopped.
    """

    seconds_by_width: Mapping[int, float]
    estimate: AcceptanceEstimate
    warmup_passes: int = 4
    min_warmup_width: int = 2
    switch_margin: float = 1.0
    width: int = 0

    def __post_init__(self) -> None:
        optimistic = {w: self.tokens_per_second(w, self.estimate.optimistic_tokens(w)) for w in self.seconds_by_width}
        if max(optimistic, key=lambda width: optimistic[width]) == 1:
            self.width = 1

    def tokens_per_second(self, width: int, tokens: float) -> float:
        """Return the tokens per second of a width, given the tokens that its step commits."""
        return tokens / self.seconds_by_width[width] * (DRAFTING_EFFICIENCY if width > 1 else 1.0)

    def choose(self) -> int:
        """Return the number of tokens that the next step feeds."""
        if self.width == 1:
            return 1
        widths = list(self.seconds_by_width)
        allowed = [width for width in widths if width >= self.min_warmup_width or self.warmup_passes <= 0] or widths
        self.warmup_passes -= 1
        rates = {width: self.tokens_per_second(width, self.estimate.expected_tokens(width)) for width in allowed}
        best = max(rates, key=lambda width: rates[width])
        if best == 1 or rates[best] > self.switch_margin * rates.get(self.width, 0.0):
            self.width = best
        return self.width

    def observe(self, num_committed: Tensor, active: Tensor) -> None:
        """Update with the tokens committed by the last step, int64 `[B]`, and which images are unfinished, bool `[B]`."""
        if self.width > 1 and num_committed.device.type == "cpu" and active.any():
            self.estimate.observe(num_committed, active, self.width)


_EMA_DECAY = 0.9
_EXPONENT = 0.75
_SHRINKAGE_PASSES = 8  # passes after which half of an image's deviation from its batch counts as its own, not as noise


@dataclass
class PowerLawEstimate:
    """Estimate for a Jacobi window W: 1 + s (W - 1)^0.75 tokens, with s from the last passes.

    On the packaged model with maximal coupling, a single s fits windows of 4, 8, 16 and 24 (1.52, 1.92, 2.63 and 3.11 tokens).
    A batch needs as many passes as its slowest image, so s of that image is used.

    Args:
        optimistic_rate: s at which a trial is worthwhile.
        ema_decay: weight of the past in the running mean.
        mean: s, over the images.
        passes: number of passes observed.
        row_offsets: s of each image minus the mean, summed over the passes.
        slowest_offset: s of the slowest image minus the mean.
    """

    optimistic_rate: float
    ema_decay: float = _EMA_DECAY
    mean: float = 0.2
    passes: int = 0
    row_offsets: Tensor | float = 0.0
    slowest_offset: float = 0.0

    def expected_tokens(self, width: int) -> float:
        return 1 + (self.mean + self.slowest_offset) * (width - 1) ** _EXPONENT

    def optimistic_tokens(self, width: int) -> float:
        return 1 + self.optimistic_rate * (width - 1) ** _EXPONENT

    def observe(self, num_committed: Tensor, active: Tensor, width: int) -> None:
        rates = (num_committed - 1) / (width - 1) ** _EXPONENT
        mean = rates[active].mean()
        self.mean = self.ema_decay * self.mean + (1 - self.ema_decay) * float(mean)
        self.passes += 1
        self.row_offsets = offsets = self.row_offsets + torch.where(active, rates - mean, 0.0)
        self.slowest_offset = float(offsets[active].min()) / (self.passes + _SHRINKAGE_PASSES)

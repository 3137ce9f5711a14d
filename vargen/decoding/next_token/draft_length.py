"""Draft length: how many tokens a pass feeds. Fixed, adapted to recent acceptance, or also to measured pass costs.

Longer drafts commit more tokens per pass but make the pass slower; the best length depends on model, batch and machine.

Shape suffixes: B images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vargen.decoding.next_token.protocols import TokenModel
from vargen.decoding.pass_costs import DRAFTING_EFFICIENCY, candidate_widths, measure_pass_costs
from vargen.kernels.dispatch import is_eager_cpu
from vargen.values import parse_float, parse_int, short_repr, suggest_names

MAX_WINDOW = 4096  # larger than any grid


class WindowState(Protocol):
    """State of a window policy for B images."""

    def widths(self, length: Tensor) -> tuple[Tensor | None, int]:
        """Return each image's window `[B]` (None: the full width) and the number of tokens the pass feeds.

        `length` `[B]` is the number of tokens committed.
        """

    def observe(self, count: Tensor, active: Tensor) -> None:
        """Update the state with the number of tokens committed, int64 `[B]`, and which images are unfinished, bool `[B]`."""


@runtime_checkable
class Window(Protocol):
    """A policy that sets the width of a pass."""

    @property
    def max_fed(self) -> int:
        """Maximum number of tokens fed in one pass."""

    @property
    def shrinks(self) -> bool:
        """Whether the window is limited automatically on a smaller grid."""

    def start(self, model: TokenModel, condition: Any, images: int) -> WindowState:
        """Return the state of B new images."""


@dataclass(frozen=True)
class Fixed:
    """Feed `max_fed` tokens in every pass."""

    max_fed: int
    shrinks: bool = field(default=False, init=False)

    def start(self, model: TokenModel, condition: Any, images: int) -> Fixed:
        return self

    def widths(self, length: Tensor) -> tuple[None, int]:
        return None, self.max_fed

    def observe(self, count: Tensor, active: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Adaptive:
    """Feed `ahead` times the running mean of committed tokens, per image.

    Each image's window depends only on its own history, so a row of a batch equals its solo run. On a CPU, a pass feeds as many
    tokens as the longest window requests. On a GPU it always feeds `max_fed`, because a changing shape would require
    synchronization.

    Args:
        min_fed, max_fed: limits on the tokens fed, at least 2.
        ahead: factor on the mean.
        memory: weight of the past in the running mean, in [0, 1).
    """

    min_fed: int = 4
    max_fed: int = 32
    ahead: float = 3.0
    memory: float = 0.8
    shrinks: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        max_fed = parse_int(self.max_fed, 2, MAX_WINDOW)
        min_fed = None if max_fed is None else parse_int(self.min_fed, 2, max_fed)
        if max_fed is None or min_fed is None:
            given = f"{short_repr(self.min_fed)} and {short_repr(self.max_fed)}"
            raise ValueError(f"a window needs whole numbers 2 <= min_fed <= max_fed <= {MAX_WINDOW}, got {given}")
        ahead, memory = parse_float(self.ahead), parse_float(self.memory)
        if ahead is None or memory is None or not (ahead > 0 and 0 <= memory < 1):
            raise ValueError(
                f"ahead must be above 0 and memory in [0, 1), got {short_repr(self.ahead)} and {short_repr(self.memory)}"
            )
        for name, value in (("min_fed", min_fed), ("max_fed", max_fed), ("ahead", ahead), ("memory", memory)):
            object.__setattr__(self, name, value)

    def start(self, model: TokenModel, condition: Any, images: int) -> _AdaptiveState:
        max_fed = min(self.max_fed, model.grid[0] * model.grid[1])
        mean = torch.full((images,), max_fed / self.ahead, device=model.device)
        return _AdaptiveState(self, max_fed, model.grid[0] * model.grid[1], mean)


@dataclass
class _AdaptiveState:
    policy: Adaptive
    max_fed: int
    total: int
    mean: Tensor

    def widths(self, length: Tensor) -> tuple[Tensor, int]:
        own = (self.mean * self.policy.ahead).ceil().long().clamp(min(self.policy.min_fed, self.max_fed), self.max_fed)
        own = torch.where(length < self.total, own, 2)  # a finished image requests the minimum
        return own, int(own.amax()) if is_eager_cpu(length) else self.max_fed

    def observe(self, count: Tensor, active: Tensor) -> None:
        self.mean = self.policy.memory * self.mean + (1 - self.policy.memory) * count


@dataclass(frozen=True)
class Auto:
    """Feed the number of tokens that maximizes tokens per second, from measured pass costs and recent acceptance.

    See `WidthController`. The selection depends on timing and on the batch, so two runs may feed different widths: the
    distribution of the images is unchanged, and with the rule `shared_noise` so are the images themselves. With other rules,
    use a fixed or adaptive window for reproducible images. On a GPU it always feeds `max_fed`, as `Adaptive` does.

    Args:
        max_fed: maximum number of tokens fed, at least 2.
        memory: weight of the past in the running acceptance, in [0, 1).
        probes: number of first passes that always draft, to measure acceptance.
        promising: acceptance at which probing is worthwhile, above 0; 0.2 is typical, 0.4 twice that. See `Growth`.
    """

    max_fed: int = 32
    memory: float = 0.9
    probes: int = 4
    promising: float = 0.4
    shrinks: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        max_fed, memory = parse_int(self.max_fed, 2, MAX_WINDOW), parse_float(self.memory)
        probes, promising = parse_int(self.probes, 0), parse_float(self.promising)
        if None in (max_fed, probes) or memory is None or promising is None or not (0 <= memory < 1 and promising > 0):
            given = (self.max_fed, self.memory, self.probes, self.promising)
            raise ValueError(
                f"an automatic window needs max_fed from 2 to {MAX_WINDOW}, memory in [0, 1), probes of at least 0 and "
                f"promising above 0, got {', '.join(map(short_repr, given))}"
            )
        for name, value in (("max_fed", max_fed), ("memory", memory), ("probes", probes), ("promising", promising)):
            object.__setattr__(self, name, value)

    def start(self, model: TokenModel, condition: Any, images: int) -> WindowState:
        max_fed = min(self.max_fed, model.grid[0] * model.grid[1])
        if model.device.type != "cpu":
            return Fixed(max_fed)
        growth = Growth(self.promising, self.memory)
        costs = measure_pass_costs(model, condition, images, candidate_widths(max_fed))
        return _ControlledWindow(WidthController(costs, growth, self.probes, least=4, margin=1.1))


@dataclass
class _ControlledWindow:
    """A window whose width `WidthController` selects."""

    choice: WidthController

    def widths(self, length: Tensor) -> tuple[None, int]:
        return None, self.choice.next()

    def observe(self, count: Tensor, active: Tensor) -> None:
        self.choice.observe(count, active)


WINDOWS: dict[str, Window] = {"adaptive": Adaptive(), "auto": Auto()}


def parse_window(value: int | str | Window) -> Window:
    """Return the policy for a number or a name.

    Raises:
        ValueError: if a number is below 2, or a name is unknown.
        TypeError: if `value` is anything else.
    """
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
        return Fixed(width)
    if not isinstance(value, int | Integral | type) and isinstance(value, Window):
        return value
    raise TypeError(f"window must be a whole number, 'adaptive', 'auto' or a Window, got {short_repr(value)}")


class AcceptanceEstimate(Protocol):
    """Estimate of the number of tokens that a step commits, learned from earlier steps."""

    def tokens(self, fed: int) -> float:
        """Expected tokens of a step that feeds `fed` tokens."""

    def promising(self, fed: int) -> float:
        """Expected tokens at the acceptance at which a trial is worthwhile."""

    def observe(self, count: Tensor, active: Tensor, fed: int) -> None:
        """Update with the tokens committed `[B]`, which images are unfinished `[B]`, and the number of tokens fed to each."""


@dataclass
class WidthController:
    """Select the number of tokens per pass that maximizes tokens per second.

    The rate of a width is its expected number of committed tokens divided by its measured seconds. If width 1 wins, as for
    batches on few cores, drafting stops for the rest of the run, which is then plain autoregressive decoding. If width 1 wins
    even at an optimistic acceptance rate, drafting never starts.

    The controller reads committed counts on the host. On a GPU it must therefore be asked only once, before the first pass.

    Args:
        seconds: of a step, by the number of tokens it feeds, including drafting and including width 1.
        expectation: estimate of the tokens that a step commits.
        probes: number of first steps that draft whatever the estimate.
        least: minimum number of tokens that those steps feed.
        margin: factor by which another width must be faster before switching. Switching to a smaller window discards draft
            tokens that earlier passes have refined.
    """

    seconds: Mapping[int, float]
    expectation: AcceptanceEstimate
    probes: int = 4
    least: int = 2
    margin: float = 1.0
    fed: int = 0

    def __post_init__(self) -> None:
        if max(self.seconds, key=lambda fed: self.rate(fed, self.expectation.promising(fed))) == 1:
            self.fed = 1

    def rate(self, fed: int, tokens: float) -> float:
        """Return the tokens per second of a width, given its number of tokens."""
        return tokens / self.seconds[fed] * (DRAFTING_EFFICIENCY if fed > 1 else 1.0)

    def next(self) -> int:
        """Return the number of tokens that the next step feeds."""
        if self.fed == 1:
            return 1
        allowed = [fed for fed in self.seconds if fed >= self.least or self.probes <= 0] or list(self.seconds)
        self.probes -= 1
        rates = {fed: self.rate(fed, self.expectation.tokens(fed)) for fed in allowed}
        best = max(rates, key=lambda fed: rates[fed])
        if best == 1 or rates[best] > self.margin * rates.get(self.fed, 0.0):
            self.fed = best
        return self.fed

    def observe(self, count: Tensor, active: Tensor) -> None:
        """Update with the tokens committed by the last step, int64 `[B]`, and which images are unfinished, bool `[B]`."""
        if self.fed > 1 and count.device.type == "cpu" and active.any():
            self.expectation.observe(count, active, self.fed)


_GROWTH = 0.75
_TRUST = 8  # passes after which half of an image's deviation from its batch counts as its own, not as noise


@dataclass
class Growth:
    """Estimate for a Jacobi window W: 1 + s (W - 1)^0.75 tokens, with s from the last passes.

    On the packaged model with maximal coupling, a single s fits windows of 4, 8, 16 and 24 (1.52, 1.92, 2.63 and 3.11 tokens).
    A batch needs as many passes as its slowest image, so s of that image is used.

    Args:
        hoped: s at which probing is worthwhile.
        memory: weight of the past in the running mean.
    """

    hoped: float
    memory: float
    mean: float = 0.2  # s, over the images
    passes: int = 0
    apart: Tensor | float = 0.0  # s of each image minus the mean, summed over the passes
    slowest: float = 0.0  # s of the slowest image minus the mean

    def tokens(self, fed: int) -> float:
        return 1 + (self.mean + self.slowest) * (fed - 1) ** _GROWTH

    def promising(self, fed: int) -> float:
        return 1 + self.hoped * (fed - 1) ** _GROWTH

    def observe(self, count: Tensor, active: Tensor, fed: int) -> None:
        seen = (count - 1) / (fed - 1) ** _GROWTH
        mean = seen[active].mean()
        self.mean = self.memory * self.mean + (1 - self.memory) * float(mean)
        self.passes += 1
        self.apart = apart = self.apart + torch.where(active, seen - mean, 0.0)
        self.slowest = float(apart[active].min()) / (self.passes + _TRUST)


_MEMORY = 0.9


@dataclass
class GeometricEstimate:
    """Estimate for a chain of L draft tokens, each accepted with probability a: (1 - a^(L + 1)) / (1 - a) tokens.

    Leviathan et al. 2023, equation 1, with a from the last passes.
    """

    hoped: float = 0.8  # a at which probing is worthwhile
    accepted: float = 3.0  # out of `examined` draft tokens; the prior is 0.6 with the weight of five
    examined: float = 5.0

    def tokens(self, fed: int) -> float:
        return sum((self.accepted / self.examined) ** drafts for drafts in range(fed))

    def promising(self, fed: int) -> float:
        return sum(self.hoped**drafts for drafts in range(fed))

    def observe(self, count: Tensor, active: Tensor, fed: int) -> None:
        kept = (count[active] - 1).float()
        self.accepted = _MEMORY * self.accepted + float(kept.sum()) / max(len(kept), 1)
        self.examined = _MEMORY * self.examined + float((kept + 1).clamp(max=fed - 1).sum()) / max(len(kept), 1)

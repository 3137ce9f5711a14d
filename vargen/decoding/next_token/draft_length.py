"""How many tokens a pass feeds: always the same number, by recent acceptance, or by that and the measured cost of a pass.

More drafts commit more tokens a pass and make the pass dearer; what pays depends on the model, the batch and the machine.

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
from vargen.decoding.pass_costs import DRAFTING_EFFICIENCY, measure_pass_costs
from vargen.kernels.dispatch import is_eager_cpu
from vargen.values import parse_float, parse_int, short_repr, suggest_names

MAX_WINDOW = 4096  # more than any grid has


class WindowState(Protocol):
    """A window policy at work on B images."""

    def widths(self, length: Tensor) -> tuple[Tensor | None, int]:
        """Each image's window `[B]` (None: all of it) and the tokens that the pass feeds; `length` `[B]` tokens are drawn."""

    def observe(self, count: Tensor, active: Tensor) -> None:
        """See the tokens committed, int64 `[B]`, and which images are unfinished, bool `[B]`."""


@runtime_checkable
class Window(Protocol):
    """A policy of windows."""

    @property
    def max_fed(self) -> int:
        """Most fed tokens."""

    @property
    def shrinks(self) -> bool:
        """Whether a smaller grid simply caps it."""

    def start(self, model: TokenModel, condition: Any, images: int) -> WindowState:
        """The state of B new images."""


@dataclass(frozen=True)
class Fixed:
    """`max_fed` tokens in every pass."""

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
    """`ahead` times the mean of recently committed tokens, per image.

    Each image's window depends on its own past alone, so a row of a batch equals its solo run. On a CPU a pass feeds as many
    tokens as the longest window asks for; on a GPU, where a changing shape would wait for the device, always `max_fed`.

    Args:
        min_fed, max_fed: fed tokens, 2 or more.
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
        own = torch.where(length < self.total, own, 2)  # a finished image asks for nothing
        return own, int(own.amax()) if is_eager_cpu(length) else self.max_fed

    def observe(self, count: Tensor, active: Tensor) -> None:
        self.mean = self.policy.memory * self.mean + (1 - self.policy.memory) * count


@dataclass(frozen=True)
class Auto:
    """The window with the most tokens per second, from the measured cost of a pass and recent acceptance; see
    `WidthController`.

    The choice follows a clock and the batch, so two runs may feed different windows: the distribution of the pictures is the
    same, and with the rule `shared_noise` the pictures are; with other rules take a fixed or an adaptive window to draw a
    picture again. On a GPU, as `Adaptive`, always `max_fed`.

    Args:
        max_fed: most fed tokens, 2 or more.
        memory: weight of the past in the running acceptance, in [0, 1).
        probes: first passes that draft, to learn how often drafts are accepted.
        promising: acceptance that is worth probing for, above 0; 0.2 is usual, 0.4 twice that. See `Growth`.
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
        candidates = [w for w in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if w < max_fed] + [max_fed]
        growth = Growth(self.promising, self.memory)
        return _ControlledWindow(
            WidthController(measure_pass_costs(model, condition, images, candidates), growth, self.probes, least=4, margin=1.1)
        )


@dataclass
class _ControlledWindow:
    """A window that `WidthController` chooses."""

    choice: WidthController

    def widths(self, length: Tensor) -> tuple[None, int]:
        return None, self.choice.next()

    def observe(self, count: Tensor, active: Tensor) -> None:
        self.choice.observe(count, active)


WINDOWS: dict[str, Window] = {"adaptive": Adaptive(), "auto": Auto()}


def parse_window(value: int | str | Window) -> Window:
    """The policy of a number or a name.

    Raises:
        ValueError: for a number below 2 or an unknown name. TypeError: for anything else.
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
    """How many tokens a step commits, learned from the steps before."""

    def tokens(self, fed: int) -> float:
        """Of a step that feeds so many."""

    def promising(self, fed: int) -> float:
        """The same, were drafts accepted as often as is worth a try."""

    def observe(self, count: Tensor, active: Tensor, fed: int) -> None:
        """See the tokens committed `[B]`, which images are unfinished `[B]`, and what each was fed."""


@dataclass
class WidthController:
    """The controller of draft lengths: it feeds what commits most tokens a second.

    Where drafting does not pay, as in batches on few cores, one token is fed from there on, which is sequential decoding; where
    it would not even pay with promising acceptance, nothing is drafted at all. It reads committed counts, so it is for the CPU,
    or to be asked once.

    Args:
        seconds: of a step, by the tokens it feeds, drafting included; 1 is among them.
        expectation: of the tokens that a step commits.
        probes: first steps that draft whatever is expected.
        least: tokens that those feed at least.
        margin: how much better another length has to be: one that shrinks loses drafts that passes have refined.
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
        """Tokens a second."""
        return tokens / self.seconds[fed] * (DRAFTING_EFFICIENCY if fed > 1 else 1.0)

    def next(self) -> int:
        """What the next step feeds."""
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
        """See the tokens that the last step committed, int64 `[B]`, and which images are unfinished, bool `[B]`."""
        if self.fed > 1 and count.device.type == "cpu" and active.any():
            self.expectation.observe(count, active, self.fed)


_GROWTH = 0.75
_TRUST = 8  # passes after which half of what sets a picture apart from its batch is taken for its own, not for chance


@dataclass
class Growth:
    """Of a Jacobi window W: 1 + s (W - 1)^0.75 tokens, with s from the last passes.

    On the packaged model with maximal coupling that fits windows of 4, 8, 16 and 24 (1.52, 1.92, 2.63 and 3.11 tokens) with one
    s. A batch takes as many passes as its slowest picture, so s is that picture's.

    Args:
        hoped: s that is worth probing for. memory: weight of the past in the running mean.
    """

    hoped: float
    memory: float
    mean: float = 0.2  # s, over the pictures
    passes: int = 0
    apart: Tensor | float = 0.0  # s of each picture less the mean, summed over the passes
    slowest: float = 0.0  # s of the slowest picture less the mean

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
    """Of a chain of L drafts, each accepted with probability a: (1 - a^(L + 1)) / (1 - a) tokens (Leviathan et al. 2023,
    equation 1), with a from the last passes."""

    hoped: float = 0.8  # a that is worth probing for
    accepted: float = 3.0  # of `examined` drafts; starts at 0.6 with the weight of five drafts
    examined: float = 5.0

    def tokens(self, fed: int) -> float:
        return sum((self.accepted / self.examined) ** drafts for drafts in range(fed))

    def promising(self, fed: int) -> float:
        return sum(self.hoped**drafts for drafts in range(fed))

    def observe(self, count: Tensor, active: Tensor, fed: int) -> None:
        kept = (count[active] - 1).float()
        self.accepted = _MEMORY * self.accepted + float(kept.sum()) / max(len(kept), 1)
        self.examined = _MEMORY * self.examined + float((kept + 1).clamp(max=fed - 1).sum()) / max(len(kept), 1)

"""How many tokens a Jacobi pass feeds: always the same number, by recent acceptance, or by that and the cost of a pass.

A wider window commits more tokens a pass and makes the pass dearer; what pays depends on the model, the batch and the machine.

Shape suffixes: B images.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor

from vargen.decoding.cost import BESIDE, pass_costs
from vargen.decoding.naming import nearest
from vargen.decoding.types import TokenModel
from vargen.values import real, shown, whole

_WIDEST = 4096  # the largest grids have as many tokens; memory is set aside for a window before it shrinks to the grid


class Window(Protocol):
    """Attributes: `widest`, most fed tokens; `shrinks`, whether a smaller grid simply caps it."""

    @property
    def widest(self) -> int: ...

    @property
    def shrinks(self) -> bool: ...

    def start(self, model: TokenModel, condition: Any, images: int) -> Any:
        """State with `widths(length)`, which returns each image's window `[B]` (None: all of it) and the pass's, and
        `learn(count, active)`, which sees the tokens committed `[B]` and which images are unfinished."""


@dataclass(frozen=True)
class Fixed:
    """`widest` tokens in every pass."""

    widest: int
    shrinks: bool = field(default=False, init=False)

    def start(self, model: TokenModel, condition: Any, images: int) -> Fixed:
        return self

    def widths(self, length: Tensor) -> tuple[None, int]:
        return None, self.widest

    def learn(self, count: Tensor, active: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Adaptive:
    """`ahead` times the mean of recently committed tokens, per image.

    Each image's window depends on its own past alone, so a row of a batch equals its solo run. On a CPU a pass feeds as many
    tokens as the longest window asks for; on a GPU, where a changing shape would wait for the device, always `widest`.

    Args:
        narrowest, widest: fed tokens, 2 or more.
        ahead: factor on the mean.
        memory: weight of the past in the running mean, in [0, 1).
    """

    narrowest: int = 4
    widest: int = 32
    ahead: float = 3.0
    memory: float = 0.8
    shrinks: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        widest = whole(self.widest, 2, _WIDEST)
        narrowest = None if widest is None else whole(self.narrowest, 2, widest)
        if widest is None or narrowest is None:
            given = f"{shown(self.narrowest)} and {shown(self.widest)}"
            raise ValueError(f"a window needs whole numbers 2 <= narrowest <= widest <= {_WIDEST}, got {given}")
        ahead, memory = real(self.ahead), real(self.memory)
        if ahead is None or memory is None or not (ahead > 0 and 0 <= memory < 1):
            raise ValueError(f"ahead must be above 0 and memory in [0, 1), got {shown(self.ahead)} and {shown(self.memory)}")
        for name, value in (("narrowest", narrowest), ("widest", widest), ("ahead", ahead), ("memory", memory)):
            object.__setattr__(self, name, value)

    def start(self, model: TokenModel, condition: Any, images: int) -> _AdaptiveState:
        widest = min(self.widest, model.grid[0] * model.grid[1])
        mean = torch.full((images,), widest / self.ahead, device=model.device)
        return _AdaptiveState(self, widest, model.grid[0] * model.grid[1], mean)


@dataclass
class _AdaptiveState:
    policy: Adaptive
    widest: int
    total: int
    mean: Tensor

    def widths(self, length: Tensor) -> tuple[Tensor, int]:
        own = (self.mean * self.policy.ahead).ceil().long().clamp(min(self.policy.narrowest, self.widest), self.widest)
        own = torch.where(length < self.total, own, 2)  # a finished image asks for nothing
        return own, int(own.amax()) if length.device.type == "cpu" else self.widest

    def learn(self, count: Tensor, active: Tensor) -> None:
        self.mean = self.policy.memory * self.mean + (1 - self.policy.memory) * count


@dataclass(frozen=True)
class Auto:
    """The window with the most tokens per second, from the measured cost of a pass and recent acceptance.

    The cost curve is measured once per network, batch and machine. Tokens per pass at window W are taken as 1 + s (W - 1)^0.75,
    with s from the last passes: on the packaged model with maximal coupling that fits windows of 4, 8, 16 and 24 (1.52, 1.92,
    2.63 and 3.11 tokens) with one s. A batch takes as many passes as its slowest picture, so s is that picture's. Where
    drafting does not pay, as for batches on few cores, the window is 1 from there on, sequential decoding; where it would not
    even if drafts were taken far more often than usual, nothing is drafted at all. The choice follows a clock and the batch, so
    two runs may feed different windows: the law of the pictures is the same, and with the rule `same_noise` the pictures are;
    with other rules take a fixed or an adaptive window to draw a picture again. On a GPU, as `Adaptive`, always `widest`.

    Args:
        widest: most fed tokens, 2 or more.
        memory: weight of the past in the running s, in [0, 1).
        probes: first passes that draft, to learn s.
        hope: s that is worth probing for, above 0; 0.2 is usual, 0.4 twice that.
    """

    widest: int = 32
    memory: float = 0.9
    probes: int = 4
    hope: float = 0.4
    shrinks: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        widest, memory, probes, hope = whole(self.widest, 2, _WIDEST), real(self.memory), whole(self.probes, 0), real(self.hope)
        if None in (widest, probes) or memory is None or hope is None or not (0 <= memory < 1 and hope > 0):
            given = (self.widest, self.memory, self.probes, self.hope)
            raise ValueError(
                f"an automatic window needs widest from 2 to {_WIDEST}, memory in [0, 1), probes of at least 0 and hope above "
                f"0, got {', '.join(map(shown, given))}"
            )
        for name, value in (("widest", widest), ("memory", memory), ("probes", probes), ("hope", hope)):
            object.__setattr__(self, name, value)

    def start(self, model: TokenModel, condition: Any, images: int) -> _AutoState:
        widest = min(self.widest, model.grid[0] * model.grid[1])
        candidates = [w for w in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if w < widest] + [widest]
        state = _AutoState(self.memory, self.probes, pass_costs(model, condition, images, candidates))
        if max(state.costs, key=lambda width: state.rate(width, self.hope)) == 1:
            state.width = 1
        return state


_GROWTH = 0.75
_TRUST = 8  # passes after which half of what sets a picture apart from its batch is taken for its own, not for chance
_WORTH_A_CHANGE = 1.1  # a window that shrinks loses drafts that passes have refined


@dataclass
class _AutoState:
    memory: float
    probes: int
    costs: dict[int, float]
    gain: float = 0.2  # s, mean of the pictures
    width: int = 0
    passes: int = 0
    beyond: Tensor | float = 0.0  # s of each picture beyond the mean, summed over the passes
    lag: float = 0.0  # s of the slowest picture beyond the mean

    def rate(self, width: int, gain: float) -> float:
        """Tokens a second."""
        return (1 + gain * (width - 1) ** _GROWTH) / self.costs[width] * (BESIDE if width > 1 else 1.0)

    def widths(self, length: Tensor) -> tuple[None, int]:
        if length.device.type != "cpu":
            return None, max(self.costs)
        if self.width == 1:
            return None, 1
        allowed = [width for width in self.costs if width >= 4 or self.probes <= 0] or list(self.costs)
        self.probes -= 1
        rates = {width: self.rate(width, self.gain + self.lag) for width in allowed}
        best = max(rates, key=lambda width: rates[width])
        if best == 1 or rates[best] > _WORTH_A_CHANGE * rates.get(self.width, 0.0):
            self.width = best
        return None, self.width

    def learn(self, count: Tensor, active: Tensor) -> None:
        if count.device.type != "cpu" or self.width < 2 or not active.any():
            return
        seen = (count - 1) / (self.width - 1) ** _GROWTH
        mean = seen[active].mean()
        self.gain = self.memory * self.gain + (1 - self.memory) * float(mean)
        self.passes += 1
        self.beyond = beyond = self.beyond + torch.where(active, seen - mean, 0.0)
        self.lag = float(beyond[active].min()) / (self.passes + _TRUST)


NAMED: dict[str, Window] = {"adaptive": Adaptive(), "auto": Auto()}


def window_of(value: int | str | Window) -> Window:
    """The policy of a number or a name.

    Raises:
        ValueError: for a number below 2 or an unknown name. TypeError: for anything else.
    """
    if isinstance(value, str):
        if value not in NAMED:
            raise ValueError(f"unknown window {shown(value)}; {nearest(value, NAMED)}, or give a whole number of at least 2")
        return NAMED[value]
    if isinstance(value, Integral) and not isinstance(value, bool):
        width = whole(value, 2)
        if width is None:
            raise ValueError(f"window must be at least 2 (one committed token and one draft), got {shown(value)}")
        return Fixed(width)
    if not isinstance(value, int | Integral | type) and hasattr(value, "start") and hasattr(value, "widest"):
        return value
    raise TypeError(f"window must be a whole number, 'adaptive', 'auto' or a Window, got {shown(value)}")

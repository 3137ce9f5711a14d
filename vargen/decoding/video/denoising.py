"""Flow matching for few-step models: pure functions on latents, noise levels and timesteps.

Latents at noise level s are (1 - s) clean + s noise; a network predicts the velocity, noise minus clean. Sources: Lipman et
al. 2023 (arXiv:2210.02747); the warped table of Wan2.1 as Huang et al. 2025, "Self Forcing" (arXiv:2506.08009), use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vargen.decoding.noise import gaussian
from vargen.decoding.video.protocols import BlockModel
from vargen.values import parse_int, short_repr

TIMESTEPS = 1000  # a timestep is a noise level times this
STEPS = (1000, 750, 500, 250)  # of the distilled models, before warping
SHIFT = 5.0


def warp(level: float, shift: float = SHIFT) -> float:
    """The noise level that takes the place of `level`: s -> shift s / (1 + (shift - 1) s).

    Raises:
        ValueError: for a level outside [0, 1], or a shift that is not above 0.
    """
    if not 0 <= level <= 1 or not 0 < shift < float("inf"):
        raise ValueError(f"level must be from 0 to 1 and shift above 0, got {level!r} and {shift!r}")
    return shift * level / (1 + (shift - 1) * level)


def shifted_levels(steps: Sequence[float] = STEPS, shift: float = SHIFT) -> tuple[float, ...]:
    """Noise levels of timesteps that are given before warping: 1, 0.9375, 0.8333, 0.625 for the distilled models.

    Raises:
        ValueError: unless the steps fall, from 1000 at most, to above 0.
    """
    if not steps or not all(a > b for a, b in pairwise(steps)) or not 0 < steps[-1] <= steps[0] <= TIMESTEPS:
        raise ValueError(f"steps must fall from at most {TIMESTEPS} to above 0, got {list(steps)}")
    return tuple(warp(step / TIMESTEPS, shift) for step in steps)


def add_noise(clean: Tensor, noise: Tensor, level: float | Tensor) -> Tensor:
    """Latents at a noise level: (1 - s) clean + s noise."""
    return (1 - level) * clean + level * noise


def predict_clean(noisy: Tensor, velocity: Tensor, level: float | Tensor) -> Tensor:
    """The clean latents that a velocity points to: noisy - s velocity, computed in float32 at least."""
    wide = noisy.float() if noisy.element_size() < 4 else noisy
    return (wide - level * velocity.to(wide.dtype)).to(noisy.dtype)


OnPass = Callable[[], None]  # after every pass; what it raises ends the run


def make_block_noise(seed: int, block: int, step: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Noise float32 `[1, *shape]` of a step of a block: the same for every model, and whatever was drawn before.

    Args:
        step: 0 for what a block starts from, k for what is added before its step k.
    """
    seeds = torch.tensor([seed], dtype=torch.int64, device=device)
    count = int(torch.Size(shape).numel())
    return gaussian(seeds, block, count, step).reshape(1, *shape)


def step_noise_level(model: BlockModel, noisy: Tensor, clean: Tensor, step: int, noise: Callable[[int], Tensor]) -> Tensor:
    """What step `step + 1` is fed, after `step` went from `noisy` to the estimate `clean`: the estimate with fresh noise, or,
    for a model that follows its velocity, the point on the line between the two."""
    level, following = model.levels[step], model.levels[step + 1]
    if model.fresh_noise:
        return add_noise(clean, noise(step + 1), following)
    return clean + (following / level) * (noisy - clean)


class BlockGenerator:
    """A model in one video.

    Args:
        commit: when it sees finished blocks. frames: latent frames that the video may have.
        fused: blocks that wait share the pass of the next block's first step, if the cache has room for all.
        on_pass: called after every pass.

    Attributes:
        passes: made so far, clean passes included. fed: blocks that they fed, which is what they cost on a busy machine.
        waiting: finished blocks that it has not seen.
    """

    def __init__(
        self,
        model: BlockModel,
        condition: Any,
        commit: Commit,
        frames: int,
        fused: bool = False,
        on_pass: OnPass = lambda: None,
    ):
        self.model, self.condition, self.commit, self.fused, self.on_pass = model, condition, commit, fused, on_pass
        self._most = commit.frames(model, frames)
        self.state = model.start(condition, self._most)
        self.waiting: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._carried: list[Tensor] = []
        self._ready = False
        self.passes = self.fed = 0

    def see(self, latents: Tensor, last: bool = False) -> None:
        """A block `[1, F, C, Y, X]` is finished. `last`: the video ends with it, so no pass is made for it."""
        self.waiting.append(latents)
        if self.commit.renews():
            self._kept = self.commit.kept([*self._kept, latents])
            self.waiting = []
        elif self.commit.due(len(self.waiting), last):
            self.catch_up()

    def switch(self, condition: Any) -> None:
        """Go on with another prompt: what waits was made under the old one, and is seen under it."""
        self.catch_up()
        self.condition = condition
        self.model.switch(self.state, condition)

    def catch_up(self, leave: int = 0) -> None:
        """See what waits, but for the last `leave` blocks, in as few passes as the cache has room for."""
        block = self.model.block_shape[0]
        while len(self.waiting) > leave:
            room, count = self.model.room(self.state), 1
            if self.waiting[0].shape[1] == block:  # others, such as a given picture, go alone: blocks are aligned
                count = max(1, min(len(self.waiting) - leave, room // block))
            self._forward(self.waiting[:count])
            del self.waiting[:count]

    def prepare(self) -> None:
        """Make the passes that `draw` would begin with: see finished blocks."""
        if not self._ready:
            self._carried, self._ready = self._before(), True

    def draw(self, noise: Callable[[int], Tensor], first: int = 0, draft: Tensor | None = None) -> Tensor:
        """Denoise the block behind the finished ones: its latents float32 `[1, F, C, Y, X]`.

        Args:
            noise: by step; see `make_block_noise`.
            first: the step to begin with. draft: what is noised to its level then; None starts from noise.
        """
        model = self.model
        self.prepare()
        clean, self._carried, self._ready = self._carried, [], False
        x = noise(0) if draft is None else add_noise(draft, noise(first), model.levels[first])
        for step in range(first, len(model.levels)):
            estimate = self._forward(clean, x, model.levels[step])
            assert estimate is not None
            if clean:
                self.waiting, clean = [], []
            x = estimate if step + 1 == len(model.levels) else step_noise_level(model, x, estimate, step, noise)
        return x

    def _before(self) -> list[Tensor]:
        """See finished blocks, but for those that the first step is to carry, which are returned."""
        if self.commit.renews():
            self.state, self.waiting = None, list(self._kept)  # freed before the new one is made
            self.state = self.model.start(self.condition, self._most)
        block = self.model.block_shape[0]
        while self.fused and self.waiting and self.waiting[0].shape[1] == block:
            fit = max(1, self.model.room(self.state) // block)
            if len(self.waiting) < fit:
                return list(self.waiting)
            self.catch_up(leave=max(0, len(self.waiting) - fit))
        self.catch_up()
        return []

    def _forward(self, clean: list[Tensor], noisy: Tensor | None = None, level: float = 0.0) -> Tensor | None:
        estimate = self.model.forward(self.state, clean, noisy, level)
        self.passes += 1
        self.fed += len(clean) + (noisy is not None)
        self.on_pass()
        return estimate


@runtime_checkable
class Commit(Protocol):
    """How a model follows the video.

    Attributes:
        exact: whether the model then sees what it would if it had seen each block when it was finished.
    """

    @property
    def exact(self) -> bool: ...

    def frames(self, model: BlockModel, frames: int) -> int:
        """How many latent frames a state must hold in a video of so many."""

    def due(self, waiting: int, last: bool) -> bool:
        """Whether the blocks that wait must be seen now, `last` being whether the video ends with them."""

    def renews(self) -> bool:
        """Whether each block is drawn from a state of its own."""

    def kept(self, seen: list[Tensor]) -> list[Tensor]:
        """Those of the finished blocks that a renewed state is made of."""


def _check(value: Any, name: str) -> None:
    if parse_int(value, 1) is None:
        raise ValueError(f"{name} must be a whole number of at least 1, got {short_repr(value)}")


@dataclass(frozen=True)
class Eager:
    """A clean pass behind every block but the last."""

    exact = True

    def frames(self, model: BlockModel, frames: int) -> int:
        return frames

    def due(self, waiting: int, last: bool) -> bool:
        return not last

    def renews(self) -> bool:
        return False

    def kept(self, seen: list[Tensor]) -> list[Tensor]:
        return []


@dataclass(frozen=True)
class Lazy:
    """Blocks wait until the model is needed, and then share as few passes as the cache allows: what comes after the model's
    last block is never run. Equal to `Eager` but for the order in which sums are rounded.

    Args:
        most: blocks that wait at most, so that memory stays flat.

    Raises:
        ValueError: for a number below 1.
    """

    most: int = 16
    exact = True

    def __post_init__(self) -> None:
        _check(self.most, "most")

    def frames(self, model: BlockModel, frames: int) -> int:
        return frames

    def due(self, waiting: int, last: bool) -> bool:
        return waiting > self.most and not last

    def renews(self) -> bool:
        return False

    def kept(self, seen: list[Tensor]) -> list[Tensor]:
        return []


@dataclass(frozen=True)
class Window:
    """Before each block of its own, the model sees the latest `blocks` of them anew, as if the video began there (as Krea's
    realtime model does): accepted drafts cost it nothing. Only for models that were trained to draw so.

    Raises:
        ValueError: for a number below 1.
    """

    blocks: int = 1
    exact = False

    def __post_init__(self) -> None:
        _check(self.blocks, "blocks")

    def frames(self, model: BlockModel, frames: int) -> int:
        return min(frames, (self.blocks + 1) * model.block_shape[0])

    def due(self, waiting: int, last: bool) -> bool:
        return False

    def renews(self) -> bool:
        return True

    def kept(self, seen: list[Tensor]) -> list[Tensor]:
        return seen[-self.blocks :]

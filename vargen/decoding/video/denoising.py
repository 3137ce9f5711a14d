"""Denoising of video blocks: flow matching for few-step models, block generation by one model, and when its cache is updated.

Latents at noise level s are (1 - s) clean + s noise; the network predicts the velocity, noise minus clean. Sources: Lipman et
al. 2023 (arXiv:2210.02747); the warped timestep table of Wan2.1 as used by Huang et al. 2025, "Self Forcing"
(arXiv:2506.08009).

The cache holds keys and values computed from *clean* latents. Every finished block must therefore pass through each model once,
whichever model generated it, before that model generates its next block.
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

TIMESTEPS = 1000  # timestep = noise level * TIMESTEPS
STEPS = (1000, 750, 500, 250)  # timesteps of the distilled models, before warping
SHIFT = 5.0


def warp(level: float, shift: float = SHIFT) -> float:
    """Warped noise level: s -> shift s / (1 + (shift - 1) s).

    Raises:
        ValueError: if the level is outside [0, 1], or the shift is not above 0.
    """
    if not 0 <= level <= 1 or not 0 < shift < float("inf"):
        raise ValueError(f"level must be from 0 to 1 and shift above 0, got {level!r} and {shift!r}")
    return shift * level / (1 + (shift - 1) * level)


def shifted_levels(steps: Sequence[float] = STEPS, shift: float = SHIFT) -> tuple[float, ...]:
    """Warp timesteps to noise levels: 1, 0.9375, 0.8333, 0.625 for the distilled models.

    Raises:
        ValueError: unless the steps decrease, from at most 1000 to above 0.
    """
    if not steps or not all(a > b for a, b in pairwise(steps)) or not 0 < steps[-1] <= steps[0] <= TIMESTEPS:
        raise ValueError(f"steps must fall from at most {TIMESTEPS} to above 0, got {list(steps)}")
    return tuple(warp(step / TIMESTEPS, shift) for step in steps)


def add_noise(clean: Tensor, noise: Tensor, level: float | Tensor) -> Tensor:
    """Return latents at a noise level: (1 - s) clean + s noise."""
    return (1 - level) * clean + level * noise


def predict_clean(noisy: Tensor, velocity: Tensor, level: float | Tensor) -> Tensor:
    """Clean latents implied by a velocity: noisy - s velocity, computed in at least float32."""
    wide = noisy.float() if noisy.element_size() < 4 else noisy
    return (wide - level * velocity.to(wide.dtype)).to(noisy.dtype)


OnPass = Callable[[], None]  # called after every pass; an exception ends the run


def make_block_noise(seed: int, block: int, step: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Noise float32 `[1, *shape]` for a step of a block: the same for every model, independent of earlier generation.

    Args:
        step: 0 for the initial noise of a block, k for the noise added before its step k.
    """
    seeds = torch.tensor([seed], dtype=torch.int64, device=device)
    count = int(torch.Size(shape).numel())
    return gaussian(seeds, block, count, step).reshape(1, *shape)


def step_noise_level(model: BlockModel, noisy: Tensor, clean: Tensor, step: int, noise: Callable[[int], Tensor]) -> Tensor:
    """Return the input of step `step + 1`, after `step` took `noisy` to the estimate `clean`.

    It is the estimate with fresh noise or, for a model that follows its velocity, the point on the line between the two.
    """
    level, following = model.levels[step], model.levels[step + 1]
    if model.fresh_noise:
        return add_noise(clean, noise(step + 1), following)
    return clean + (following / level) * (noisy - clean)


class BlockGenerator:
    """Block generation of one model in one video, and its KV cache.

    Args:
        commit: when finished blocks are written to the cache.
        frames: maximum number of latent frames of the video.
        fused: pending blocks share the pass of the next block's first step, if the cache has room for all.
        on_pass: called after every pass.

    Attributes:
        passes: number of passes so far, including cache updates.
        fed: number of blocks fed by them, which determines their cost on a busy machine.
        waiting: finished blocks that are not in the cache yet.
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
        """Add a finished block `[1, F, C, Y, X]`. If `last`, the video ends with it, and no pass is run for it."""
        self.waiting.append(latents)
        if self.commit.renews():
            self._kept = self.commit.kept([*self._kept, latents])
            self.waiting = []
        elif self.commit.due(len(self.waiting), last):
            self.catch_up()

    def switch(self, condition: Any) -> None:
        """Switch to another prompt. Pending blocks were generated under the old prompt and are cached under it first."""
        self.catch_up()
        self.condition = condition
        self.model.switch(self.state, condition)

    def catch_up(self, leave: int = 0) -> None:
        """Write pending blocks to the cache, except the last `leave`, in as few passes as the cache has room for."""
        block = self.model.block_shape[0]
        while len(self.waiting) > leave:
            room, count = self.model.room(self.state), 1
            if self.waiting[0].shape[1] == block:  # others, such as a given image, are fed alone: blocks are aligned
                count = max(1, min(len(self.waiting) - leave, room // block))
            self._forward(self.waiting[:count])
            del self.waiting[:count]

    def prepare(self) -> None:
        """Run the cache updates that `draw` would start with."""
        if not self._ready:
            self._carried, self._ready = self._before(), True

    def draw(self, noise: Callable[[int], Tensor], first: int = 0, draft: Tensor | None = None) -> Tensor:
        """Denoise the block after the finished ones: latents float32 `[1, F, C, Y, X]`.

        Args:
            noise: function of the step; see `make_block_noise`.
            first: the step to start with.
            draft: latents to which noise is added to the level of that step; None starts from noise.
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
        """Update the cache. Returns the blocks that the first denoising step feeds instead."""
        if self.commit.renews():
            self.state, self.waiting = None, list(self._kept)  # free the old state before the new one is allocated
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
    """When the KV cache of a model is updated with finished blocks.

    Attributes:
        exact: whether the model then attends to the same content as if the cache were updated after every block.
    """

    @property
    def exact(self) -> bool: ...

    def frames(self, model: BlockModel, frames: int) -> int:
        """Number of latent frames that a state must hold for a video of `frames`."""

    def due(self, waiting: int, last: bool) -> bool:
        """Return whether pending blocks must be written to the cache now; `last`: the video ends with them."""

    def renews(self) -> bool:
        """Whether each block is generated from a new state."""

    def kept(self, seen: list[Tensor]) -> list[Tensor]:
        """Select the finished blocks from which a new state is built."""


def _check(value: Any, name: str) -> None:
    if parse_int(value, 1) is None:
        raise ValueError(f"{name} must be a whole number of at least 1, got {short_repr(value)}")


@dataclass(frozen=True)
class Eager:
    """Update the cache with a clean pass after every block except the last."""

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
    """Delay cache updates until the model is needed, and then use as few passes as the cache allows.

    Blocks after the last one that this model generates are never fed. Equal to `Eager` up to floating-point rounding.

    Args:
        most: maximum number of pending blocks, which bounds memory.

    Raises:
        ValueError: if the number is below 1.
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
    """Before each block it generates, recompute the cache from the latest `blocks` blocks, as if the video started there.

    Krea's realtime model does this. Accepted drafts cost the model nothing. Only for models trained this way.

    Raises:
        ValueError: if the number is below 1.
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

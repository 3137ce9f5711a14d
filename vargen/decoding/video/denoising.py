"""Denoising of video blocks: flow matching for few-step models, block generation by one model, and when its cache is updated.

Latents at noise level s are (1 - s) clean + s noise; the network predicts the velocity, noise minus clean. Sources: Lipman et
al. 2023 (arXiv:2210.02747); the warped timestep table of Wan2.1 as used by Huang et al. 2025, "Self Forcing"
(arXiv:2506.08009).

The cache holds keys and values computed from *clean* latents. Every finished block must therefore pass through each model once,
whichever model generated it, before that model generates its next block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.noise import sample_normal
from vargen.decoding.video.interfaces import BlockModel

TIMESTEPS = 1000  # timestep = noise level * TIMESTEPS
MAX_PENDING_BLOCKS = 16  # bounds the memory of blocks that wait for a cache update
STEPS = (1000, 750, 500, 250)  # timesteps of the distilled models, before warping
SHIFT = 5.0


def shift_level(level: float, shift: float = SHIFT) -> float:
    """Warped noise level: s -> shift s / (1 + (shift - 1) s)."""
    if not 0 <= level <= 1 or not 0 < shift < float("inf"):
        raise ValueError(f"level must be from 0 to 1 and shift above 0, got {level!r} and {shift!r}")
    return shift * level / (1 + (shift - 1) * level)


def shifted_levels(steps: Sequence[float] = STEPS, shift: float = SHIFT) -> tuple[float, ...]:
    """Warp timesteps to noise levels: 1, 0.9375, 0.8333, 0.625 for the distilled models."""
    if not steps or not all(a > b for a, b in pairwise(steps)) or not 0 < steps[-1] <= steps[0] <= TIMESTEPS:
        raise ValueError(f"steps must fall from at most {TIMESTEPS} to above 0, got {list(steps)}")
    return tuple(shift_level(step / TIMESTEPS, shift) for step in steps)


def add_noise(clean: Tensor, noise: Tensor, level: float | Tensor) -> Tensor:
    """Return latents at a noise level: (1 - s) clean + s noise."""
    return (1 - level) * clean + level * noise


def predict_clean(noisy: Tensor, velocity: Tensor, level: float | Tensor) -> Tensor:
    """Clean latents implied by a velocity: noisy - s velocity, computed in at least float32."""
    wide = noisy.float() if noisy.element_size() < 4 else noisy
    return (wide - level * velocity.to(wide.dtype)).to(noisy.dtype)


PassCallback = Callable[[], None]  # called after every pass; an exception ends the run


def make_block_noise(seed: int, block: int, step: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Noise float32 `[1, *shape]` for a step of a block: the same for every model, independent of earlier generation.

    Args:
        step: 0 for the initial noise of a block, k for the noise added before its step k.
    """
    seeds = torch.tensor([seed], dtype=torch.int64, device=device)
    count = int(torch.Size(shape).numel())
    return sample_normal(seeds, block, count, step).reshape(1, *shape)


def step_noise_level(model: BlockModel, noisy: Tensor, clean: Tensor, step: int, noise: Callable[[int], Tensor]) -> Tensor:
    """Return the input of step `step + 1`, after `step` took `noisy` to the estimate `clean`.

    It is the estimate with fresh noise or, for a model that follows its velocity, the point on the line between the two.
    """
    level, following = model.levels[step], model.levels[step + 1]
    if model.resamples_noise:
        return add_noise(clean, noise(step + 1), following)
    return clean + (following / level) * (noisy - clean)


class BlockContext:
    """What a network attends to in one video: the finished blocks in its KV cache, and those that are not in it yet.

    Args:
        frames: maximum number of latent frames of the video.
        lazy: delay cache updates until the network is needed, and then use as few passes as the cache allows; blocks after the
            last one that the network generates are never fed. Otherwise update after every block. Both generate the same blocks
            up to rounding.

    Attributes:
        state: of the network, with the cache.
        pending: finished blocks that are not in the cache yet.
    """

    def __init__(self, model: BlockModel, condition: Any, frames: int, lazy: bool = True):
        self.state = model.start(condition, frames)
        self.pending: list[Tensor] = []
        self.max_pending = MAX_PENDING_BLOCKS if lazy else 0


class BlockGenerator:
    """Block generation of one model in one video.

    Args:
        context: of the model's network; models with one network may share it.
        on_pass: called after every pass.

    Attributes:
        passes: number of passes so far, including cache updates.
        estimates: the clean estimate `[1, F, C, Y, X]` after each step of the latest block. noisy: the input of its last step.
    """

    def __init__(self, model: BlockModel, context: BlockContext, on_pass: PassCallback = lambda: None):
        self.model, self.context, self.on_pass = model, context, on_pass
        self.estimates: list[Tensor] = []
        self.noisy: Tensor | None = None
        self.passes = 0

    def add_finished(self, latents: Tensor, last: bool = False) -> None:
        """Add a finished block `[1, F, C, Y, X]`. If `last`, the video ends with it, and no pass is run for it."""
        self.context.pending.append(latents)
        if len(self.context.pending) > self.context.max_pending and not last:
            self.update_cache()

    def change_prompt(self, condition: Any) -> None:
        """Use another prompt. Pending blocks were generated under the old prompt and are cached under it first."""
        self.update_cache()
        self.model.switch(self.context.state, condition)

    def update_cache(self) -> None:
        """Write pending blocks to the cache in as few passes as the cache has room for."""
        block, pending = self.model.block_shape[0], self.context.pending
        while pending:
            count = 1
            if pending[0].shape[1] == block:  # others, such as a given image, are fed alone: blocks are aligned
                count = max(1, min(len(pending), self.model.free_frames(self.context.state) // block))
            self._forward(pending[:count])
            del pending[:count]

    # -- denoising -------------------------------------------------------------------------------------------------------------

    def generate(self, noise: Callable[[int], Tensor], last: int | None = None) -> Tensor:
        """Denoise the block after the finished ones: latents float32 `[1, F, C, Y, X]`.

        Args:
            noise: function of the step; see `make_block_noise`.
            last: the number of steps after which to return the clean estimate; None for all. `resume` runs the others.
        """
        self.update_cache()
        self.estimates = []
        self.noisy = noise(0)
        return self._denoise(noise, 0, len(self.model.levels) if last is None else last)

    def resume(self, noise: Callable[[int], Tensor]) -> Tensor:
        """Run the remaining steps of a block that `generate` left early."""
        done = len(self.estimates)
        assert self.noisy is not None
        self.noisy = step_noise_level(self.model, self.noisy, self.estimates[-1], done - 1, noise)
        return self._denoise(noise, done, len(self.model.levels))

    def _denoise(self, noise: Callable[[int], Tensor], first: int, end: int) -> Tensor:
        assert self.noisy is not None
        for step in range(first, end):
            estimate = self._forward([], self.noisy, self.model.levels[step])
            assert estimate is not None
            self.estimates.append(estimate)
            if step + 1 < end:
                self.noisy = step_noise_level(self.model, self.noisy, estimate, step, noise)
        return self.estimates[-1]

    def _forward(self, clean: list[Tensor], noisy: Tensor | None = None, level: float = 0.0) -> Tensor | None:
        estimate = self.model.forward(self.context.state, clean, noisy, level)
        self.passes += 1
        self.on_pass()
        return estimate

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

from vargen.decoding.noise import Purpose
from vargen.decoding.video.interfaces import BlockModel
from vargen.kernels.noise_bits import sample_normal

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


def make_block_noise(seed: int, block: int, step: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Noise float32 `[1, *shape]` for a step of a block: the same for every model, independent of earlier generation.

    Args:
        step: 0 for the initial noise of a block, k for the noise added before its step k.
    """
    seeds = torch.tensor([seed], dtype=torch.int64, device=device)
    count = int(torch.Size(shape).numel())
    return sample_normal(seeds, block, count, Purpose.LATENT, step).reshape(1, *shape)


def step_noise_level(model: BlockModel, noisy: Tensor, clean: Tensor, step: int, noise: Callable[[int], Tensor]) -> Tensor:
    """Return the input of step `step + 1`, after `step` took `noisy` to the estimate `clean`.

    It is the estimate with fresh noise or, for a model that follows its velocity, the point on the line between the two.
    """
    level, following = model.levels[step], model.levels[step + 1]
    if model.resamples_noise:
        return add_noise(clean, noise(step + 1), following)
    return clean + (following / level) * (noisy - clean)


class BlockGenerator:
    """Block generation of one model in one video.

    Args:
        frames: maximum number of latent frames of the video.
        lazy: delay cache updates until the model is needed, and then use as few passes as the cache allows; blocks after the
            last one that the model generates are never fed. Otherwise update after every block. Both generate the same blocks
            up to rounding.
        shared: another generator, whose cache this one uses too.
        on_pass: called after every pass; an exception ends the run.

    Attributes:
        state: of the model, with the cache.
        pending: finished blocks that are not in the cache yet.
        passes: number of passes so far, including cache updates.
    """

    _clean: Tensor  # the estimate after the latest step

    def __init__(
        self,
        model: BlockModel,
        condition: Any,
        frames: int,
        lazy: bool = True,
        shared: BlockGenerator | None = None,
        on_pass: Callable[[], None] = lambda: None,
    ):
        self.model, self.on_pass, self.passes = model, on_pass, 0
        self.pending: list[Tensor] = []
        self.max_pending = MAX_PENDING_BLOCKS if lazy else 0
        if shared is None:
            self.state = model.start(condition, frames)
        else:
            self.state, self.pending, self.max_pending = shared.state, shared.pending, shared.max_pending

    def add_finished(self, latents: Tensor, last: bool = False) -> None:
        """Add a finished block `[1, F, C, Y, X]`. If `last`, the video ends with it, and no pass is run for it."""
        self.pending.append(latents)
        if len(self.pending) > self.max_pending and not last:
            self.update_cache()

    def change_prompt(self, condition: Any) -> None:
        """Use another prompt. Pending blocks were generated under the old prompt and are cached under it first."""
        self.update_cache()
        self.model.switch(self.state, condition)

    def update_cache(self) -> None:
        """Write pending blocks to the cache in as few passes as the cache has room for."""
        block, pending = self.model.block_shape[0], self.pending
        while pending:
            count = 1
            if pending[0].shape[1] == block:  # others, such as a given image, are fed alone: blocks are aligned
                count = max(1, min(len(pending), self.model.free_frames(self.state) // block))
            self._forward(pending[:count])
            del pending[:count]

    def generate(self, noise: Callable[[int], Tensor], last: int | None = None) -> Tensor:
        """Denoise the block after the finished ones: latents float32 `[1, F, C, Y, X]`.

        Args:
            noise: function of the step; see `make_block_noise`.
            last: the number of steps after which to return the clean estimate; None for all. `resume` runs the others.
        """
        self.update_cache()
        self._noise, self._noisy, self._done = noise, noise(0), 0
        return self.resume(last)

    def resume(self, last: int | None = None) -> Tensor:
        """Run the remaining steps of a block that `generate` left early."""
        levels = self.model.levels[:last]
        for step in range(self._done, len(levels)):
            if step:
                self._noisy = step_noise_level(self.model, self._noisy, self._clean, step - 1, self._noise)
            self._clean = self._forward([], self._noisy, levels[step])
        self._done = len(levels)
        return self._clean

    def _forward(self, clean: list[Tensor], noisy: Tensor | None = None, level: float = 0.0) -> Any:
        estimate = self.model.forward(self.state, clean, noisy, level)
        self.passes += 1
        self.on_pass()
        return estimate

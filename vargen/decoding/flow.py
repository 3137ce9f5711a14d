"""Flow matching for few-step models: pure functions on latents, noise levels and timesteps.

Latents at noise level s are (1 - s) clean + s noise; a network predicts the velocity, noise minus clean. Sources: Lipman et
al. 2023 (arXiv:2210.02747); the warped table of Wan2.1 as Huang et al. 2025, "Self Forcing" (arXiv:2506.08009), use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

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


def warped_levels(steps: Sequence[float] = STEPS, shift: float = SHIFT) -> tuple[float, ...]:
    """Noise levels of timesteps that are given before warping: 1, 0.9375, 0.8333, 0.625 for the distilled models.

    Raises:
        ValueError: unless the steps fall, from 1000 at most, to above 0.
    """
    if not steps or not all(a > b for a, b in pairwise(steps)) or not 0 < steps[-1] <= steps[0] <= TIMESTEPS:
        raise ValueError(f"steps must fall from at most {TIMESTEPS} to above 0, got {list(steps)}")
    return tuple(warp(step / TIMESTEPS, shift) for step in steps)


def noised(clean: Tensor, noise: Tensor, level: float | Tensor) -> Tensor:
    """Latents at a noise level: (1 - s) clean + s noise."""
    return (1 - level) * clean + level * noise


def clean_from(noisy: Tensor, velocity: Tensor, level: float | Tensor) -> Tensor:
    """The clean latents that a velocity points to: noisy - s velocity, computed in float32 at least."""
    wide = noisy.float() if noisy.element_size() < 4 else noisy
    return (wide - level * velocity.to(wide.dtype)).to(noisy.dtype)

"""What the networks of a video model are trained by: data read from TOML files, as the other recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vargen.training.recipe import Schedule, at_least


@dataclass(frozen=True)
class VideoVAERecipe:
    """How to train a `CausalVideoVAE`. `model` holds the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 16  # clips
    frames: int = 6  # successive ones of each clip: the decoder's causal layers look back four
    shift: int = 4  # pixels, each way
    zoom: list[Any] = field(default_factory=lambda: [0.8, 1.1])  # of half of the clips, on white
    l1_weight: float = 1.0
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    colour_weight: float = 1.0
    wavelet_weight: float = 0.5
    motion_weight: float = 1.0  # L1 of differences of successive frames: without it, what stands still flickers
    kl_weight: float = 3e-4  # a latent number's divergence from N(0, 1): keeps sizes equal and their map smooth
    latent_noise: float = 0.2  # most noise, in standard deviations, on half of the clips' latents: a generator errs
    weight_decay: float = 0.01
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "evaluate_every", "checkpoint_every")
        at_least(self, 2, "frames")
        at_least(self, 0, "shift", "motion_weight", "kl_weight", "latent_noise", "weight_decay")
        if len(self.zoom) != 2 or not 0 < self.zoom[0] <= self.zoom[1]:
            raise ValueError(f"zoom must be two factors above 0, the smaller first, got {self.zoom}")

"""What the networks of a video model are trained by: data read from TOML files, as the other recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vargen.decoding.video.denoising import shifted_levels
from vargen.training.config import Schedule, at_least


@dataclass(frozen=True)
class AutoencoderConfig:
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


OBJECTIVES = ("flow", "consistency")


@dataclass(frozen=True)
class VideoConfig:
    """How to train a `CausalVideoTransformer` on latents. `model` holds the keyword arguments of its constructor.

    With the objective "flow" it learns the velocity of data; with "consistency" it learns to come to a teacher's end in few
    steps.
    """

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    objective: str = "flow"
    seed: int = 0
    batch_size: int = 16  # clips
    caption_rows: int = 20  # longer captions are cut: one shape for all batches
    caption_dropout: float = 0.1
    motion_told: float = 0.5  # share of clips whose level of motion is told
    rolled: float = 0.3  # share of loops that begin elsewhere; their first block is given, not learned
    independent: float = 0.75  # first part: each block with noise of its own; then clean context before noisy blocks
    context_noise: float = 0.2  # most noise on half of the clean contexts: drawn ones err
    rollout: float = 0.0  # share of the last part's steps whose context the model has drawn itself
    motion_weight: float = 3.0  # by how much more a place counts for moving as much as the mean
    shift: float = 2.0  # of noise levels, towards noise
    levels: list[Any] = field(default_factory=lambda: [1000, 750, 500, 250])  # timesteps of few-step drawing, before the shift
    euler_steps: int = 16  # of drawing with a flow; and between whose neighbours consistency is learned
    guidance: float = 2.0  # of drawing with a flow, and of a teacher's steps
    averaged: float = 0.999  # decay of the average of weights, which are what is saved
    optimizer: str = "muon"
    adamw_learning_rate: float = 2e-3
    adamw_beta2: float = 0.99
    weight_decay: float = 0.1
    compile: bool = False
    evaluate_every: int = 500
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "caption_rows", "euler_steps", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "motion_weight", "guidance", "weight_decay", "adamw_learning_rate")
        for name in ("caption_dropout", "motion_told", "rolled", "independent", "context_noise", "rollout", "averaged"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a share from 0 to 1, got {getattr(self, name)!r}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer must be 'muon' or 'adamw', got {self.optimizer!r}")
        shifted_levels(self.levels, self.shift)  # raises ValueError


@dataclass(frozen=True)
class PreviewConfig:
    """How to train a `PreviewDecoder` on latents and frames. `model` holds the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 64  # frames
    latent_noise: float = 0.2
    l1_weight: float = 1.0
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    colour_weight: float = 1.0
    weight_decay: float = 0.01
    evaluate_every: int = 500
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "latent_noise", "weight_decay")

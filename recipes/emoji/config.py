"""How the tokenizer and the scorer of emoji are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vargen.training.config import Schedule, at_least


@dataclass(frozen=True)
class TokenizerConfig:
    """How to train a `VQModel`. `model` holds the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 32
    crop: int = 64  # pixels; crops of the content teach more per multiply than the white around it
    full_fraction: float = 0.15  # last part of training: whole pictures, as used later
    autoencoder_steps: int = 200  # before the codebook is fitted by k-means: nothing is quantised
    decoder_steps: int = 0  # last ones: encoder and codebook stay, so tokens do, and the decoder learns from whole pictures
    l1_weight: float = 1.0
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    colour_weight: float = 2.0
    commitment_weight: float = 0.25
    plain_weight: float = 10.0  # commitment of patches of one plain colour, which share a code; 0 lets each choose
    codebook_decay: float = 0.98
    revive_every: int = 50
    weight_decay: float = 0.01
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "crop", "revive_every", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "autoencoder_steps", "decoder_steps", "full_fraction")
        check_phases(self.schedule, self.autoencoder_steps, self.decoder_steps)


@dataclass(frozen=True)
class ScorerConfig:
    """How to train an `ImageTextModel` on pictures and captions. `model` holds the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 64
    sizes: list[int] = field(default_factory=lambda: [64, 64, 96])  # pixels of a side, one of them for each step
    tokenized: float = 0.5  # share of pictures that passed through the image tokenizer, where such a copy is at hand
    tokenized_per_step: int = 4  # such copies made anew in each step
    wrong_codes: float = 0.15  # most of the tokens that are wrong in such a copy
    recoloured: float = 0.3  # share of pictures with a colour in their name that change both
    label_smoothing: float = 0.05
    pair_weight: float = 1.0  # of the loss over (picture, caption with style) pairs beside that over concepts
    weight_decay: float = 0.1
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "tokenized_per_step", "pair_weight", "weight_decay")
        if not self.sizes or any(size < 16 or size % 16 for size in self.sizes):
            raise ValueError(f"sizes must be multiples of 16, at least one, got {self.sizes}")


def check_phases(schedule: Schedule, autoencoder_steps: int, decoder_steps: int) -> None:
    """Raise ValueError unless a tokenizer's run has steps for its codebook between its first and its last phase."""
    spoken_for = autoencoder_steps + decoder_steps
    if schedule.steps <= spoken_for:
        raise ValueError(
            f"steps must be at least {spoken_for + 1}, got {schedule.steps}: autoencoder_steps ({autoencoder_steps}) before "
            f"anything is quantised, then some for the codebook, then decoder_steps ({decoder_steps})"
        )

"""What a next-scale model is trained on, and how its tokenizer is: data read from a TOML file, as the other recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recipes.emoji.config import check_phases
from vargen.training.config import Schedule, at_least
from vargen.training.focus import Focus


@dataclass(frozen=True)
class MultiScaleTokenizerConfig:
    """How to train a `MultiScaleVQModel`. `model` holds the keyword arguments of its constructor.

    There are three phases: `autoencoder_steps` without quantisation, then all of it, then `decoder_steps` of the decoder alone.
    """

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    focus: Focus = field(default_factory=Focus)
    seed: int = 0
    batch_size: int = 64
    shift: int = 8  # pixels, each way
    zoom: list[Any] = field(default_factory=lambda: [0.8, 1.1])  # of half of the pictures, on white
    autoencoder_steps: int = 300
    decoder_steps: int = 0  # last ones: encoder, codes and phi stay, so tokens do
    l1_weight: float = 1.0
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    colour_weight: float = 2.0
    wavelet_weight: float = 0.5
    commitment_weight: float = 0.25  # mean over the scales
    prefix_share: float = 0.1  # of the pictures that are decoded from their first scales only, so that previews mean something
    perturbed_pictures: float = 0.5  # in the decoder's phase: a generator errs, and the decoder should forgive
    perturbed_tokens: float = 0.1  # of those pictures' tokens: replaced by one of the nearest codes
    near_codes: int = 100
    codebook_decay: float = 0.99
    revive_every: int = 50
    weight_decay: float = 0.01
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "revive_every", "evaluate_every", "checkpoint_every", "near_codes", "autoencoder_steps")
        at_least(self, 0, "decoder_steps", "shift", "prefix_share", "perturbed_pictures", "perturbed_tokens")
        if len(self.zoom) != 2 or not 0 < self.zoom[0] <= self.zoom[1]:
            raise ValueError(f"zoom must be two factors above 0, the smaller first, got {self.zoom}")
        check_phases(self.schedule, self.autoencoder_steps, self.decoder_steps)

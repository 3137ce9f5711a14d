"""The recipe of next-scale training: frozen data, read from a TOML file by `recipe.load_config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vargen.training.config import Schedule, at_least
from vargen.training.focus import Focus


@dataclass(frozen=True)
class NextScaleConfig:
    """How to train a `VARTransformer` on captioned pictures. `model` holds the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    focus: Focus = field(default_factory=Focus)
    seed: int = 0
    batch_size: int = 64
    early_batch_size: int = 0  # more pictures a step of which only the first scales are learned: a quarter of the cost each
    early_scales: int = 4
    caption_dropout: float = 0.1
    caption_rows: int = 16  # longer captions are cut: one shape for all batches
    code_noise: float = 0.3  # most of the codes of a scale that are replaced; what follows is quantised anew to mend it
    shift_pixels: int = 8  # augmentation: each picture is encoded at several offsets up to this
    shift_variants: int = 7
    mirrored: float = 0.0  # share of pictures that are mirrored, where nothing is written and no side is named
    recoloured: float = 0.15  # share of the pictures of one dominant colour that get another, and its word in the caption
    adamw_learning_rate: float = 4e-3
    adamw_beta2: float = 0.996
    weight_decay: float = 0.2
    all_scales: float = 0.4  # with a teacher: the first part of training is on all scales
    late_scales: int = 2  # with a teacher: the rest is on this many of the last ones, half of it on histories that it has drawn
    cross_entropy: float = 0.3  # weight of the pictures' own codes beside the teacher's probs in the second part
    compile: bool = False
    evaluate_every: int = 500
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "early_scales", "caption_rows", "late_scales", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "early_batch_size", "shift_pixels", "shift_variants", "weight_decay", "cross_entropy")
        for name in ("caption_dropout", "code_noise", "mirrored", "recoloured", "all_scales"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a share from 0 to 1, got {getattr(self, name)!r}")

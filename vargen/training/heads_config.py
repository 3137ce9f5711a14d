"""How to train a drafter on the features of a frozen transformer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vargen.options import OPTIONS
from vargen.training.config import Schedule, at_least


@dataclass(frozen=True)
class HeadConfig:
    """How to train an `EagleDrafter` or a `MedusaDrafter`. `model`: what its constructor takes beside the target's sizes."""

    model: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    pictures: int = 6000  # drawn from the target, of which those held out are the last
    held_out: int = 64
    draw_batch: int = 16
    hot_share: float = 0.25  # share of the pictures that are drawn at temperature 1, so that a drafter knows flat ones
    sampling: dict[str, Any] = field(default_factory=dict)  # where it will be another than the model's defaults
    batch_size: int = 16
    unrolled: int = 3  # drafts in a row that an EAGLE layer is trained on
    step_weights: list[float] = field(default_factory=lambda: [1.0, 0.8, 0.6])  # of these, or of heads; then the last
    feature_weight: float = 0.5  # of the loss on features beside that on probabilities
    weight_decay: float = 0.01
    evaluate_every: int = 100
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        at_least(self, 1, "pictures", "held_out", "draw_batch", "batch_size", "unrolled", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "hot_share", "feature_weight", "weight_decay")
        if self.hot_share > 1:
            raise ValueError(f"hot_share must be a share from 0 to 1, got {self.hot_share}")
        if self.held_out >= self.pictures:
            raise ValueError(f"held_out must be less than the {self.pictures} pictures, got {self.held_out}")
        weights = self.step_weights
        if not weights or not all(isinstance(weight, int | float) and weight >= 0 for weight in weights) or not sum(weights):
            raise ValueError(f"step_weights must be numbers of at least 0, not all 0, got {weights}")
        for name in self.sampling:
            if name not in OPTIONS:
                raise ValueError(f"sampling has an unknown setting {name!r}; it may have {', '.join(OPTIONS)}")

    def weight(self, step: int) -> float:
        """Of the loss at a step."""
        return self.step_weights[min(step, len(self.step_weights) - 1)]

    def with_images(self, count: int | None) -> HeadConfig:
        """For `count` generated images, of which at most a tenth are held out; itself for None."""
        if count is None:
            return self
        return replace(self, pictures=count, held_out=min(self.held_out, max(1, count // 10)))

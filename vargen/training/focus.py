"""Sampling weights of the kinds of images in the emoji data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Focus:
    """How often training samples each kind of image.

    A small model must see each image dozens of times, so it learns more from a smaller selection.
    """

    styles: dict[str, Any] = field(default_factory=lambda: {"3d": 1.0, "flat": 1.0, "twemoji": 0.2, "noto": 0.2})
    skin_tones: float = 0.05
    groups: dict[str, Any] = field(default_factory=lambda: {"people & body": 0.5, "flags": 0.5})

    def __post_init__(self) -> None:
        for name, factors in (("styles", self.styles), ("groups", self.groups), ("skin_tones", {"": self.skin_tones})):
            for key, factor in factors.items():
                if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 <= factor < float("inf"):
                    raise ValueError(f"{name} must be factors of at least 0, got {factor!r}{f' for {key!r}' if key else ''}")

    def factor(self, record: Mapping[str, Any]) -> float:
        """Return the relative sampling rate of a record; kinds that are not listed have factor 1."""
        return (
            self.styles.get(record.get("style", ""), 1.0)
            * self.groups.get(record.get("group", ""), 1.0)
            * (self.skin_tones if record.get("skin_tone") else 1.0)
        )

    def weights(self, records: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return float64 `[N]` that sums to 1.

        Raises:
            ValueError: if no image remains.
        """
        weights = np.array([self.factor(record) for record in records], dtype=np.float64)
        if not weights.sum() > 0:
            raise ValueError(f"focus leaves none of the {len(records)} pictures")
        return weights / weights.sum()

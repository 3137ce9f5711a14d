"""Augmentation of captioned images: how often each kind is sampled, shifts, mirror images, and changed colors.

Images with changed hues get matching captions, so that a model learns color words ("a blue apple").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

# Hues of the color names in degrees, as people use them: yellow is narrow, green wide.
HUES = {"red": 2.0, "orange": 28.0, "yellow": 50.0, "green": 125.0, "blue": 215.0, "purple": 275.0, "pink": 325.0}
HUE_NAMES = tuple(HUES)
_UPPER = {"red": 14.0, "orange": 40.0, "yellow": 68.0, "green": 175.0, "blue": 250.0, "purple": 298.0, "pink": 345.0}
_MIN_COLORED = 0.4  # minimum share of an image's content that is colored
_DOMINANT = 0.75  # minimum share of the colored part that is near one hue
_NEAR = 22.0  # degrees


def find_color_word(degrees: float) -> str:
    """Return the color name of a hue."""
    return next((name for name, upper in _UPPER.items() if degrees < upper), "red")


def dominant_hue(image: np.ndarray) -> float | None:
    """Return the hue in degrees of most of a uint8 image `[Y, X, 3]`, or None if no hue dominates.

    The white background is ignored, and so are black, gray and dull brown.
    """
    content = image.reshape(-1, 3)[(image < 245).any(-1).ravel()]
    if len(content) < 0.02 * image.shape[0] * image.shape[1]:
        return None
    hue, saturation, value = _hsv(content)
    colored = (saturation > 0.35) & (value > 0.45)
    if colored.mean() < _MIN_COLORED:
        return None
    hues = hue[colored]
    counts = np.bincount((hues / 5).astype(np.int64) % 72, minlength=72)
    around = counts + np.roll(counts, 1) + np.roll(counts, -1)
    middle = 5.0 * int(around.argmax()) + 2.5
    difference = (hues - middle + 180) % 360 - 180
    near = np.abs(difference) < _NEAR
    return float((middle + np.median(difference[near])) % 360) if near.mean() >= _DOMINANT else None


def rotate_hue(image: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate all hues of a uint8 image `[Y, X, 3]` by `degrees`; grays do not change."""
    hue, saturation, value = _hsv(image.reshape(-1, 3))
    sector = ((hue + degrees) % 360) / 60
    channels = []
    for shift in (5, 3, 1):
        k = (shift + sector) % 6
        channels.append(value - value * saturation * np.clip(np.minimum(k, 4 - k), 0, 1))
    return (np.stack(channels, -1) * 255).round().astype(np.uint8).reshape(image.shape)


def _hsv(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hue in degrees, and saturation and value in [0, 1], of uint8 colors `[n, 3]`."""
    red, green, blue = (rgb.astype(np.float32) / 255).T
    value = np.maximum(np.maximum(red, green), blue)
    take_evenly = value - np.minimum(np.minimum(red, green), blue)
    safe = np.where(take_evenly > 0, take_evenly, 1)
    hue = np.where(
        value == red, (green - blue) / safe, np.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    )
    return (hue * 60) % 360, np.where(value > 0, take_evenly / np.where(value > 0, value, 1), 0), value


def recolor_caption(text: str, old: str, new: str) -> str | None:
    """Rewrite a caption for an object whose color changed from `old` to `new`; None if it names other colors as well.

    If `old` and `new` are equal, the caption only gains the color word.
    """
    words = text.replace(",", " ,").split(" ")
    named = [word for word in words if word in HUES]
    if any(word != old for word in named):
        return None
    if named:
        words = [new if word == old else word for word in words]
    else:
        start = 2 if words[:2] == ["emoji", "of"] else 0
        start += words[start] in ("a", "an", "the")
        words.insert(start, new)
    for i, word in enumerate(words[:-1]):
        if word in ("a", "an") and words[i + 1] in HUES:
            words[i] = "an" if words[i + 1] == "orange" else "a"
    return " ".join(words).replace(" ,", ",")


def shift_images(images: np.ndarray, dy: int, dx: int) -> np.ndarray:
    """Shift uint8 images `[B, Y, X, 3]` by (dy, dx) pixels and fill with white."""
    moved = np.full_like(images, 255)
    Y, X = images.shape[1:3]
    moved[:, max(dy, 0) : Y + min(dy, 0), max(dx, 0) : X + min(dx, 0)] = images[
        :, max(-dy, 0) : Y + min(-dy, 0), max(-dx, 0) : X + min(-dx, 0)
    ]
    return moved


@dataclass(frozen=True)
class SamplingWeights:
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
            raise ValueError(f"sampling_weights must leave some of the {len(records)} images")
        return weights / weights.sum()


class AugmentationConfig(Protocol):
    """The fields of a config that control augmentation."""

    @property
    def sampling_weights(self) -> SamplingWeights: ...
    @property
    def seed(self) -> int: ...
    @property
    def caption_dropout(self) -> float: ...
    @property
    def shift_pixels(self) -> int: ...
    @property
    def shift_variants(self) -> int: ...
    @property
    def flip_probability(self) -> float: ...
    @property
    def recolor_probability(self) -> float: ...


class WeightedIndices:
    """Samples indices in proportion to weights, from uniform random numbers.

    Args:
        indices: int64 `[N]`. weights: float64 `[N]` that sum to 1.
    """

    def __init__(self, indices: np.ndarray, weights: np.ndarray):
        self.indices, self.cumulative = indices, np.cumsum(weights)

    def __call__(self, uniforms: np.ndarray) -> np.ndarray:
        """Return an index for each number in [0, 1)."""
        places = np.searchsorted(self.cumulative, uniforms, side="right")
        return self.indices[places.clip(max=len(self.indices) - 1)]

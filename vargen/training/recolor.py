"""Color augmentation: images with changed hues and matching captions, so that the model learns color words ("a blue apple")."""

from __future__ import annotations

import numpy as np

# Hues of the color names in degrees, as people use them: yellow is narrow, green wide.
HUES = {"red": 2.0, "orange": 28.0, "yellow": 50.0, "green": 125.0, "blue": 215.0, "purple": 275.0, "pink": 325.0}
COLOURS = tuple(HUES)
_UPPER = {"red": 14.0, "orange": 40.0, "yellow": 68.0, "green": 175.0, "blue": 250.0, "purple": 298.0, "pink": 345.0}
_COLOURED = 0.4  # minimum share of an image's content that is colored
_DOMINANT = 0.75  # minimum share of the colored part that is near one hue
_NEAR = 22.0  # degrees


def color_of_hue(degrees: float) -> str:
    """Return the color name of a hue."""
    return next((name for name, upper in _UPPER.items() if degrees < upper), "red")


def dominant_hue(picture: np.ndarray) -> float | None:
    """Return the hue in degrees of most of a uint8 image `[Y, X, 3]`, or None if no hue dominates.

    The white background is ignored, and so are black, gray and dull brown.
    """
    content = picture.reshape(-1, 3)[(picture < 245).any(-1).ravel()]
    if len(content) < 0.02 * picture.shape[0] * picture.shape[1]:
        return None
    hue, saturation, value = _hsv(content)
    coloured = (saturation > 0.35) & (value > 0.45)
    if coloured.mean() < _COLOURED:
        return None
    hues = hue[coloured]
    counts = np.bincount((hues / 5).astype(np.int64) % 72, minlength=72)
    around = counts + np.roll(counts, 1) + np.roll(counts, -1)
    middle = 5.0 * int(around.argmax()) + 2.5
    apart = (hues - middle + 180) % 360 - 180
    near = np.abs(apart) < _NEAR
    return float((middle + np.median(apart[near])) % 360) if near.mean() >= _DOMINANT else None


def turned(picture: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate all hues of a uint8 image `[Y, X, 3]` by `degrees`; grays do not change."""
    hue, saturation, value = _hsv(picture.reshape(-1, 3))
    sector = ((hue + degrees) % 360) / 60
    channels = []
    for shift in (5, 3, 1):
        k = (shift + sector) % 6
        channels.append(value - value * saturation * np.clip(np.minimum(k, 4 - k), 0, 1))
    return (np.stack(channels, -1) * 255).round().astype(np.uint8).reshape(picture.shape)


def _hsv(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hue in degrees, and saturation and value in [0, 1], of uint8 colors `[n, 3]`."""
    red, green, blue = (rgb.astype(np.float32) / 255).T
    value = np.maximum(np.maximum(red, green), blue)
    spread = value - np.minimum(np.minimum(red, green), blue)
    safe = np.where(spread > 0, spread, 1)
    hue = np.where(
        value == red, (green - blue) / safe, np.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    )
    return (hue * 60) % 360, np.where(value > 0, spread / np.where(value > 0, value, 1), 0), value


def recolor_caption(text: str, own: str, new: str) -> str | None:
    """Rewrite a caption for an object whose color changed from `own` to `new`; None if it names other colors as well.

    If `own` and `new` are equal, the caption only gains the color word.
    """
    words = text.replace(",", " ,").split(" ")
    named = [word for word in words if word in HUES]
    if any(word != own for word in named):
        return None
    if named:
        words = [new if word == own else word for word in words]
    else:
        start = 2 if words[:2] == ["emoji", "of"] else 0
        start += words[start] in ("a", "an", "the")
        words.insert(start, new)
    for i, word in enumerate(words[:-1]):
        if word in ("a", "an") and words[i + 1] in HUES:
            words[i] = "an" if words[i + 1] == "orange" else "a"
    return " ".join(words).replace(" ,", ",")

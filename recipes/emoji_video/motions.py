"""Motions that have a word: how a still image bounces, spins or slides in, frame by frame, and the phrases that ask for it.

Lengths are fractions of the frame's side; x grows to the right, y downward. Shape suffixes: F frames, Y/X pixels.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

SPEEDS = ("slowly", "", "quickly")  # the word for a motion's speed; none for the usual one
_HELD_OUT_PER_MILLE = 80
_OVERSAMPLING = 2  # frames are rendered at this multiple of their size, then averaged
_WHITE = (255, 255, 255)


@dataclass(frozen=True)
class Poses:
    """Where an image is in each frame, float64 `[F]` each.

    Attributes:
        x, y: shift of its center from that of the frame. angle: degrees clockwise. width, height: relative to the frame.
        visible: 0 or 1. pivot: the point, from its center downward, around which it turns.
    """

    x: np.ndarray
    y: np.ndarray
    angle: np.ndarray
    width: np.ndarray
    height: np.ndarray
    visible: np.ndarray
    pivot: float = 0.0


def _poses(frames: int, size: float, pivot: float = 0.0, **values: np.ndarray) -> Poses:
    """Return poses at a constant size in the middle, except for the given values."""
    defaults = {"x": 0.0, "y": 0.0, "angle": 0.0, "width": size, "height": size, "visible": 1.0}
    arrays = {key: np.broadcast_to(values.get(key, np.float64(value)), frames) for key, value in defaults.items()}
    return Poses(**arrays, pivot=pivot)


def rest(size: float) -> Poses:
    """Return one pose: in the middle, upright."""
    return _poses(1, size)


# A motion is a function of the number of frames, how often it repeats in them (or how fast it arrives) and the size of the
# image at rest. Except where the image first comes into view, it begins at rest in the middle: what follows a start image is
# then determined by the words, and its size does not change at once.
PoseFunction = Callable[[int, float, float], Poses]


def _cycles(frames: int, rate: float) -> np.ndarray:
    return rate * np.arange(frames) / frames


def _across(frames: int, rate: float, size: float) -> np.ndarray:
    """Return places on a way from the middle out of the frame and in again on the other side."""
    return (1 + size) * ((_cycles(frames, rate) + 0.5) % 1 - 0.5)


def _bounce(frames: int, rate: float, size: float) -> Poses:
    ground, rise = 0.48 - size / 2, 0.96 - size
    start = 0.5 + math.sqrt(max(0.0, 1 - ground / rise)) / 2  # falling, at the height of the middle
    u = (_cycles(frames, rate) + start) % 1
    height = 1 - (2 * u - 1) ** 2
    squash = 0.22 * np.clip(1 - height / 0.3, 0, 1)
    tall = size * (1 - squash)
    return _poses(frames, size, y=0.48 - tall / 2 - rise * height, width=size * (1 + squash / 2), height=tall)


def _spin(frames: int, rate: float, size: float) -> Poses:
    return _poses(frames, size, angle=360 * _cycles(frames, rate))


def _shake(frames: int, rate: float, size: float) -> Poses:
    swing = np.sin(2 * math.pi * _cycles(frames, rate))
    return _poses(frames, size, x=0.09 * swing, angle=5 * swing)


def _pulse(frames: int, rate: float, size: float) -> Poses:
    pulse = size * (1 + 0.3 * np.sin(2 * math.pi * _cycles(frames, rate)))
    return _poses(frames, size, width=pulse, height=pulse)


def _slide_in(frames: int, rate: float, size: float) -> Poses:
    arrived = np.clip(rate * np.arange(frames) / frames, 0, 1)
    return _poses(frames, size, x=-(0.5 + size / 2) * (1 - arrived) ** 2)


def _fall(frames: int, rate: float, size: float) -> Poses:
    return _poses(frames, size, y=_across(frames, rate, size))


def _wave(frames: int, rate: float, size: float) -> Poses:
    return _poses(frames, size, pivot=size / 2, angle=24 * np.sin(2 * math.pi * _cycles(frames, rate)))


def _blink_in(frames: int, rate: float, size: float) -> Poses:
    done = rate * np.arange(frames) / frames
    return _poses(frames, size, visible=((done >= 1) | ((done * 3) % 1 >= 0.5)).astype(np.float64))


def _roll(frames: int, rate: float, size: float) -> Poses:
    x = _across(frames, rate, size)
    return _poses(frames, size, x=x, angle=np.degrees(2 * x / size))


@dataclass(frozen=True)
class Motion:
    """A motion and its words.

    Attributes:
        participle: as in "a bouncing pizza". verb: as in "a pizza that bounces".
        after: whether the participle follows the noun, as in "a pizza sliding in from the left".
        poses: from frames, rate and size. rates: slow, usual, fast, in times per clip where the motion repeats.
        loops: whether it repeats.
    """

    participle: str
    verb: str
    poses: PoseFunction
    rates: tuple[float, float, float]
    after: bool = False
    loops: bool = True


MOTIONS: dict[str, Motion] = {
    "bounce": Motion("bouncing", "bounces", _bounce, (1, 2, 3)),
    "spin": Motion("spinning", "spins", _spin, (0.5, 1, 2)),
    "shake": Motion("shaking", "shakes", _shake, (4, 6, 8)),
    "pulse": Motion("growing and shrinking", "grows and shrinks", _pulse, (1, 2, 3), after=True),
    "slide": Motion(
        "sliding in from the left", "slides in from the left", _slide_in, (1.2, 1.8, 3), after=True, loops=False
    ),
    "fall": Motion("falling", "falls", _fall, (0.5, 1, 2)),
    "wave": Motion("waving side to side", "waves from side to side", _wave, (0.5, 1, 2), after=True),
    "blink": Motion("blinking into view", "blinks into view", _blink_in, (1.2, 1.8, 3), after=True, loops=False),
    "roll": Motion("rolling", "rolls", _roll, (0.5, 1, 2)),
}  # fmt: skip


def is_held_out_motion(concept: str, motion: str) -> bool:
    """Whether a concept is never shown in this motion in training: a fixed 8 % of the pairs, chosen by a hash."""
    digest = hashlib.sha256(f"{concept}/{motion}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < _HELD_OUT_PER_MILLE


def motion_caption(motion: Motion, noun: str, article: str, speed: str, rng: random.Random) -> str:
    """Return a caption such as "a bouncing pizza" or "a pizza that bounces quickly".

    Args:
        noun: without an article, possibly with a style after a comma. article: "a", "an" or "".
    """
    noun, comma, style = noun.partition(",")
    rest = comma + style
    how = f" {speed}" if speed else ""
    form = rng.random()
    with_article = f"{article} {noun}" if article else noun
    if form < 0.5 and not motion.after:
        opening = f"{'a' if article else ''} ".lstrip()
        return f"{opening}{how.strip() + ' ' if how else ''}{motion.participle} {noun}{rest}"
    if form < 0.75:
        return f"{with_article} {motion.participle}{how}{rest}"
    relative = "that " if article and form < 0.9 else ""
    return f"{with_article} {relative}{motion.verb}{how}{rest}"


def render(image: np.ndarray, poses: Poses, side: int) -> np.ndarray:
    """Render an image on white in each pose.

    Args:
        image: uint8 `[Y, X, 3]`, square, on white.

    Returns:
        uint8 `[F, side, side, 3]`.
    """
    source, canvas = Image.fromarray(image), _OVERSAMPLING * side
    frames = np.full((len(poses.x), side, side, 3), 255, dtype=np.uint8)
    for i, frame in enumerate(frames):
        if not poses.visible[i]:
            continue
        # PIL maps places of the canvas to places of the source: unshift, turn back, scale, in lengths of the frame.
        angle = math.radians(poses.angle[i])
        cosine, sine = math.cos(angle), math.sin(angle)
        wide, tall = image.shape[1] / (canvas * poses.width[i]), image.shape[0] / (canvas * poses.height[i])
        pivot = poses.pivot * canvas
        x0, y0 = (0.5 + poses.x[i]) * canvas, (0.5 + poses.y[i]) * canvas + pivot
        matrix = (
            wide * cosine, wide * sine, -wide * (cosine * x0 + sine * y0) + image.shape[1] / 2,
            -tall * sine, tall * cosine, tall * (sine * x0 - cosine * y0 + pivot) + image.shape[0] / 2,
        )  # fmt: skip
        turned = source.transform((canvas, canvas), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=_WHITE)
        frame[:] = np.asarray(turned.reduce(_OVERSAMPLING))
    return frames

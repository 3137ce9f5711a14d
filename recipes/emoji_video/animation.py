"""Animated WebP files to clips of a fixed number of frames, chosen so that things move and, where possible, the clip loops.

Shape suffixes: N frames of a file, F frames of a clip, Y/X pixels.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageSequence

from vargen.reading import on_white, open_image

FPS = 12  # at which clips are played
_SPEEDS = (0.5, 1.6)  # of a clip, of the file's own; outside, motion no longer looks as its name says
_SEAM = 1.5  # a clip loops if the step from its last to its first frame is at most so many of its mean steps ...
_LARGEST = 1.0  # ... and at most so many of its largest one
_STILL = 0.25  # mean change of a pixel, of 255, below which two frames are one picture with compression noise
_CUT_GAIN = 1.25  # a part has to move so much more than the whole to be taken in its place


@dataclass(frozen=True)
class Cut:
    """Which frames of a file make a clip.

    Attributes:
        positions: int64 `[F]`, frames of the file.
        motion: mean absolute difference of successive frames, in 0 to 255.
        loops: whether the first frame follows the last one as smoothly as any other its predecessor.
        speed: of the clip when it is played at `FPS`, relative to the file.
    """

    positions: np.ndarray
    motion: float
    loops: bool
    speed: float


def read_animation(blob: bytes, side: int) -> tuple[np.ndarray, float]:
    """All frames of an animated picture, drawn on white: uint8 `[N, side, side, 3]`, and its length in seconds.

    Raises:
        ValueError: if it cannot be read.
    """
    frames, milliseconds = [], 0.0
    with open_image(io.BytesIO(blob)) as opened:
        for frame in ImageSequence.Iterator(opened):
            frames.append(np.asarray(on_white(frame).resize((side, side), Image.Resampling.LANCZOS)))
            milliseconds += frame.info.get("duration", 0)  # 0 where none is written, of which browsers make 100
    return np.stack(frames), (milliseconds or 100.0 * len(frames)) / 1000


def _differences(frames_NYXC: np.ndarray) -> np.ndarray:
    """`[N, N]` float32: mean absolute difference of each two frames, after 2 x 2 means."""
    N, Y, X, C = frames_NYXC.shape
    small = frames_NYXC[:, : Y // 2 * 2, : X // 2 * 2].reshape(N, Y // 2, 2, X // 2, 2, C).mean((2, 4), dtype=np.float32)
    flat = small.reshape(N, -1)
    return np.stack([np.abs(flat - row).mean(1) for row in flat])


def _candidates(N: int, seconds: float, count: int) -> list[np.ndarray]:
    """Sequences of frames: the whole animation, played a whole number of times, then parts of it at its own speed."""
    length = count / FPS
    found = []
    for times in (1, 2, 3):
        if _SPEEDS[0] <= times * seconds / length <= _SPEEDS[1]:
            found.append(np.floor(np.arange(count) * (times * N / count)).astype(np.int64) % N)
    step = N / seconds / FPS  # frames of the file for one of the clip
    span = step * (count - 1)
    for start in range(0, max(0, int(N - span)), 2):
        found.append(start + np.floor(np.arange(count) * step).astype(np.int64))
    # An animation of a length that none of this fits: all of it, however fast it then is.
    return found or [np.floor(np.arange(count) * (N / count)).astype(np.int64)]


def choose_cut(frames_NYXC: np.ndarray, seconds: float, count: int) -> Cut:
    """The clip of `count` frames to take of an animation.

    A clip that loops is preferred to one that does not, and among equals the one that moves most; a part of the animation has
    to move clearly more than the whole.

    Args:
        frames_NYXC: uint8. seconds: length of the animation, above 0.
    """
    N = len(frames_NYXC)
    if N < 2 or seconds <= 0:
        return Cut(np.zeros(count, dtype=np.int64) % N, 0.0, True, 1.0)
    apart = _differences(frames_NYXC)
    best: tuple[bool, float, Cut] | None = None
    for index, positions in enumerate(_candidates(N, seconds, count)):
        steps = apart[positions[:-1], positions[1:]]
        seam, motion = float(apart[positions[-1], positions[0]]), float(steps.mean())
        loops = seam <= max(_STILL, min(_SEAM * motion, _LARGEST * float(steps.max())))
        advanced = (np.diff(positions) % N).sum() * count / (count - 1)
        cut = Cut(positions, motion, loops, float(advanced / N * seconds * FPS / count))
        rank = (loops, motion * (_CUT_GAIN if index == 0 else 1.0), cut)
        if best is None or rank[:2] > best[:2]:
            best = rank
    assert best is not None
    return best[2]

"""Videos to files: mp4 with PyAV, animated gif and webp with Pillow. A file appears whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vargen.files import atomic_file, expand_user
from vargen.values import parse_float, short_repr

FORMATS = (".mp4", ".gif", ".webp")
_CODECS = ("libx264", "mpeg4")  # the first that this build of FFmpeg has


def check_video_path(path: Any, name: str = "path") -> Path:
    """The file to write.

    Raises:
        ValueError: for another suffix. ImportError: for an mp4 without PyAV.
    """
    file = expand_user(path, name)
    if file.suffix.lower() not in FORMATS:
        raise ValueError(f"{name} must end in one of {', '.join(FORMATS)}, got {short_repr(str(path))}")
    if file.suffix.lower() == ".mp4":
        _av()
    return file


def save_video(frames: Any, path: Any, fps: float, comment: str = "") -> Path:
    """Write a video, whole or not at all; gif and webp loop.

    Args:
        frames: PIL images, or numbers in [0, 1] as `[F, Y, X, 3]` numpy or `[F, 3, Y, X]` torch.
        path: ends in .mp4, .gif or .webp. fps: frames per second. comment: kept in the file, where it can be.

    Raises:
        ValueError: for no frame, frames of different sizes, another suffix, or a rate that is not above 0.
        ImportError: for an mp4 without PyAV. OSError: where it cannot be written; nothing is left behind then.
    """
    file, rate = check_video_path(path), parse_float(fps)
    if rate is None or rate <= 0:
        raise ValueError(f"fps must be a number above 0, got {short_repr(fps)}")
    pictures = _pictures(frames)
    with atomic_file(file) as temporary:
        if file.suffix.lower() == ".mp4":
            _write_mp4(pictures, temporary, rate, comment)
        else:
            _write_animation(pictures, temporary, rate, file.suffix.lower(), comment)
    return file


def _pictures(frames: Any) -> list[Image.Image]:
    if isinstance(frames, Tensor):
        frames = frames.detach().float().cpu().permute(0, 2, 3, 1).numpy() if frames.ndim == 4 else frames
    if isinstance(frames, np.ndarray) and frames.ndim == 4 and frames.shape[-1] == 3:
        if not np.isfinite(frames).all():
            raise ValueError("frames must hold finite numbers from 0 to 1, and hold NaN or infinite ones")
        frames = [Image.fromarray(frame) for frame in (frames.clip(0, 1) * 255).round().astype(np.uint8)]
    if not isinstance(frames, Sequence) or not frames or not all(isinstance(frame, Image.Image) for frame in frames):
        raise ValueError(f"frames must be PIL images, or numbers [F, Y, X, 3] or [F, 3, Y, X], got {short_repr(frames)}")
    if len({frame.size for frame in frames}) > 1:
        raise ValueError(f"frames must be of one size, got {sorted({frame.size for frame in frames})[:4]}")
    return [frame.convert("RGB") for frame in frames]


def _write_animation(pictures: list[Image.Image], file: Path, fps: float, suffix: str, comment: str) -> None:
    options: dict[str, Any] = {"save_all": True, "append_images": pictures[1:], "loop": 0, "duration": round(1000 / fps)}
    if suffix == ".gif":
        pictures[0].save(file, format="GIF", disposal=2, comment=comment.encode()[:255] or None, **options)
    else:
        pictures[0].save(file, format="WEBP", lossless=True, **options)


def _write_mp4(pictures: list[Image.Image], file: Path, fps: float, comment: str) -> None:
    """H.264 where FFmpeg has it. Sides are made even, as its colours need, by repeating the last row or column."""
    av = _av()
    codec = next((name for name in _CODECS if name in av.codecs_available), _CODECS[-1])
    width, height = pictures[0].size
    with av.open(str(file), "w", format="mp4") as container:
        if comment:
            container.metadata["comment"] = comment
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        if codec == "libx264":
            stream.options = {"crf": "12", "preset": "medium"}
        else:
            stream.bit_rate = max(1_000_000, width * height * 10)
        for picture in pictures:
            pixels = np.pad(np.asarray(picture), ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ImportError('mp4 needs PyAV: pip install "av>=12"; .gif and .webp need nothing') from error
    return av

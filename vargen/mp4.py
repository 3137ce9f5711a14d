"""Writing MP4 with PyAV: whole files, or a stream that plays while it is made."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

_CODECS = ("libx264", "mpeg4")  # in order of preference


def import_av() -> Any:
    """Return PyAV."""
    try:
        import av
    except ImportError as error:
        raise ImportError('mp4 needs PyAV: pip install "av>=12"; .gif and .webp need nothing') from error
    return av


class Mp4Writer:
    """Encodes frames, with H.264 if FFmpeg has it. Odd sides are extended, as yuv420p needs even ones.

    Args:
        file: a path, or a file object; one that cannot seek needs `live`.
        size: width and height in pixels.
        fps: frames per second, above 0.
        comment: stored in the metadata.
        live: write each frame at once, as a fragment of its own, so that players show what has been written.
    """

    def __init__(self, file: Any, size: tuple[int, int], fps: float, comment: str = "", live: bool = False):
        self._av, (width, height) = import_av(), size
        codec = next((name for name in _CODECS if name in self._av.codecs_available), _CODECS[-1])
        options = {"movflags": "empty_moov+default_base_moof+frag_every_frame"} if live else {}
        self._container = self._av.open(file, "w", format="mp4", options=options)
        if comment:
            self._container.metadata["comment"] = comment
        self._stream = self._container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        self._padding = ((0, height % 2), (0, width % 2), (0, 0))
        self._stream.width, self._stream.height, self._stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        if codec == "libx264":
            self._stream.options = {"crf": "12", "preset": "medium", **({"tune": "zerolatency"} if live else {})}
        else:
            self._stream.bit_rate = max(1_000_000, width * height * 10)

    def add(self, frame: Any) -> None:
        """Encode a frame, uint8 `[Y, X, 3]`."""
        pixels = np.pad(np.asarray(frame), self._padding, mode="edge")
        self._container.mux(self._stream.encode(self._av.VideoFrame.from_ndarray(pixels, format="rgb24")))

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._container.mux(self._stream.encode())
        self._container.close()

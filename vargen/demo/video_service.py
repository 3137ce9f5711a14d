"""The video model of the page, and the videos in progress."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image

from vargen.decoding import VideoBlock, VideoMethod, resolve_method

MIN_TAU, MAX_TAU = -10.0, 10.0


class VideoService:
    """A loaded video pipeline and its active videos, by ticket.

    Args:
        pipe: a video pipeline, on its device. name: display name of the model. scorer: scores drafts; None for the packaged
            one. image_pipe: generates the image that a video starts from, if the model may start from one.
    """

    def __init__(self, pipe: Any, name: str, scorer: Any = None, image_pipe: Any = None):
        self.pipe, self.name, self.scorer, self.image_pipe = pipe, name, scorer, image_pipe
        self.methods = [each for each in pipe.list_methods() if each.unsupported_reason is None]
        self._streams: dict[object, Any] = {}
        self._lock = threading.Lock()

    @property
    def default_method(self) -> str:
        starts = self.image_pipe is not None and self.pipe.setting("image")
        return str(self.pipe.resolve_method(None, from_image=starts).name)

    @property
    def default_tau(self) -> float:
        """The initial value of the slider."""
        tau = self.pipe.resolve_method(None).threshold
        return 0.0 if tau is None else min(MAX_TAU, max(MIN_TAU, tau))

    def generate(
        self, ticket: object, prompt: str, seed: int, num_blocks: int, method: str, tau: float
    ) -> Iterator[tuple[VideoBlock, Any]]:
        """Yield each finished block with all frames of the video so far, as uint8 `[F, Y, X, 3]`."""
        image = self.image_pipe or False if self.pipe.setting("image") else False
        threshold = tau if resolve_method(method, VideoMethod.paradigm).threshold is not None else None
        stream = self.pipe.stream(
            prompt, image=image, num_blocks=num_blocks, accelerator=method, tau=threshold, scorer=self.scorer,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        with self._lock:
            self._streams[ticket] = stream
        frames = []
        try:
            for block in stream:
                frames.append(block.frames.mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy())
                yield block, np.concatenate(frames)
        finally:
            with self._lock:
                self._streams.pop(ticket, None)
            stream.close()

    def set_tau(self, ticket: object, tau: float) -> bool:
        """Change the threshold of an active video; False if the video has none."""
        with self._lock:
            stream = self._streams.get(ticket)
        if stream is None or stream.tau is None:
            return False
        stream.tau = tau
        return True

    def stop(self, ticket: object) -> None:
        """Stop a video within one pass."""
        with self._lock:
            stream = self._streams.get(ticket)
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """Stop all videos."""
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.cancel()


def encode_animation(frames: Any, fps: float, quality: int = 90) -> bytes:
    """Encode uint8 `[F, Y, X, 3]` as a looping WebP of a quality from 0 to 100."""
    images = [Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    images[0].save(file, "WEBP", save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0, quality=quality)
    return file.getvalue()

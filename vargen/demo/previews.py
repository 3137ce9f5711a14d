"""Partial images of a job during its generation, as small files, and when they are due."""

from __future__ import annotations

import io
import time

import torch
from PIL import Image

from vargen.demo.jobs import Job
from vargen.pipelines.base import VisualPipeline

_SECONDS = 0.25  # between previews
_RATIO = 4  # previews take at most a fifth of the time: the next waits four times the cost of the last


class PreviewSchedule:
    """Updates the partial images of a job.

    Args:
        wanted: whether there are any.
        every_pass: whether they are decoded after each pass, regardless of the cost.
    """

    def __init__(self, pipe: VisualPipeline, job: Job, wanted: bool, every_pass: bool):
        self.pipe, self.job, self.wanted, self.every_pass = pipe, job, wanted, every_pass
        self._due = time.perf_counter() + _SECONDS

    def __call__(self, tokens: torch.Tensor, done: int) -> float:
        """Decode the first `done` of tokens `[B, N]`, if a preview is due. Returns the seconds that it took."""
        now = time.perf_counter()
        if not self.wanted or not 0 < done < self.job.total or not (self.every_pass or now >= self._due):
            return 0.0
        self.job.preview = [self._encode(image) for image in self.pipe.preview(tokens, done)]
        spent = time.perf_counter() - now
        self._due = now + spent + max(_SECONDS, _RATIO * spent)
        return spent

    @staticmethod
    def _encode(image: Image.Image) -> bytes:
        file = io.BytesIO()
        image.save(file, format="WEBP", quality=80, method=0)
        return file.getvalue()

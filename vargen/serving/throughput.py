"""Counts of finished tasks, and how fast they finish."""

from __future__ import annotations

import math
import time
from collections import deque

from vargen.serving.tasks import GeneratedImage, GeneratedVideo, GenerationStats

_RATE_IMAGES = 32  # finished images from which the rate is measured
_IDLE_SECONDS = 60.0  # images that finished earlier no longer count for the rate


class Throughput:
    """Counts of finished images or videos. The caller holds a lock."""

    def __init__(self) -> None:
        self._images = self._tokens = self._passes = 0
        self._ends: deque[float] = deque(maxlen=_RATE_IMAGES)

    def record(self, image: GeneratedImage | GeneratedVideo) -> None:
        """Count a finished image or video."""
        self._images, self._tokens, self._passes = (
            self._images + 1,
            self._tokens + image.num_tokens,
            self._passes + image.passes,
        )
        self._ends.append(time.monotonic())

    @property
    def images_per_second(self) -> float:
        """Images per second in the last minute."""
        now = time.monotonic()
        ends = [end for end in self._ends if end > now - _IDLE_SECONDS]
        return len(ends) / (now - ends[0]) if len(ends) > 1 else 0.0

    def seconds_until_free(self, count: int) -> int:
        """Whole seconds, from 1 to 60, after which `count` more images have probably finished."""
        rate = self.images_per_second
        return min(60, max(1, math.ceil(count / rate))) if rate else 1

    def make_stats(self, num_waiting: int, num_active: int, alive: bool) -> GenerationStats:
        """Return all counts."""
        counts = self._images, self._tokens, self._passes
        return GenerationStats(num_waiting, num_active, *counts, self.images_per_second, alive)

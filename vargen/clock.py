"""Wall-clock time by part, measured where the host waits for the device anyway, or on request."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Clock:
    """Measures the parts of a run.

    Args:
        device: on which the passes run.
        profile: on CUDA, synchronize between parts to measure their seconds.

    Attributes:
        timer: returns seconds; a measurement on a busy machine may replace it by process time.
        read: returns the time, on a GPU after what it has to do.
        parts: seconds by name.
    """

    timer = staticmethod(time.perf_counter)

    def __init__(self, device: torch.device, profile: bool):
        self.device = device
        self.read = self._read_device if device.type == "cuda" else self.timer
        self.measures_parts = profile or device.type != "cuda"
        self.parts: dict[str, float] = defaultdict(float)
        self.restart()

    def restart(self) -> None:
        """Begin to measure."""
        self.parts.clear()
        self.started = self.read()

    @property
    def synchronizes(self) -> bool:
        """Whether the device is synchronized between parts."""
        return self.measures_parts and self.device.type == "cuda"

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Add the time of the block to the part `name`, unless the block raises."""
        return _Part(self, name) if self.measures_parts else nullcontext()

    def _read_device(self) -> float:
        torch.cuda.current_stream(self.device).synchronize()
        return self.timer()


class _Part:
    """Adds the time of a block to a part; a class, because generators take several times as long to enter."""

    __slots__ = ("clock", "name", "start")

    def __init__(self, clock: Clock, name: str):
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.start = self.clock.read()

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            self.clock.parts[self.name] += self.clock.read() - self.start

"""Common services of all loops: timing by part, the check for non-finite logits, the callback, and the stop condition.

On a GPU it does not synchronize: whether images are finished and logits are finite is read through a CUDA event one or more
passes later.

Shape suffixes: B images, N units (tokens) of an image, T units of one pass.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.sampling import Sampling
from vargen.decoding.stats import DecodeStats
from vargen.device import normal_tensors
from vargen.values import short_repr


class NonFiniteLogitsError(RuntimeError):
    """The model returned NaN or infinite logits; no image is returned."""


@dataclass
class Progress:
    """State passed to a callback after each pass.

    Attributes:
        step: number of target passes so far; the prefill is the first.
        tokens: int64 `[B, N]`; entries from `length` on are not generated yet.
        length: int64 `[B]`, tokens generated per image.
        total: N.
        num_committed: int64 `[B]`, tokens that this pass committed.
    """

    step: int
    tokens: Tensor
    length: Tensor
    total: int
    num_committed: Tensor


@dataclass
class DecodeOutput:
    """Result of `decode`: tokens int64 `[B, N]`, length int64 `[B]` (N unless a callback stopped the run), and statistics.

    `decode_scales` also returns the canvas, the accumulated image of all scales.
    """

    tokens: Tensor
    length: Tensor
    stats: DecodeStats
    finished: bool = field(default=True)
    canvas: Tensor | None = None


def describe_non_finite_logits(position: int, total: int, step: int) -> str:
    """Return the error message for logits that are not finite at a token in a pass."""
    return (
        f"the model returned NaN or infinite logits at token {position} of {total}, pass {step}; no image is returned. Check "
        "the checkpoint, or run with torch_dtype=torch.float32"
    )


Callback = Callable[[Progress], bool | None]


def sum_rows(logits: Tensor) -> Tensor:
    """Sum each row of logits `[..., V]` in float32: finite where all of them are, unless the sum overflows."""
    return logits.sum(-1, dtype=torch.float32)


def validate_call(seeds: Any, sampling: Any, callback: Any) -> None:
    """Validate the arguments that all loops share."""
    if not isinstance(seeds, Tensor) or seeds.dtype != torch.int64 or seeds.dim() != 1:
        given = f"{seeds.dtype} {list(seeds.shape)}" if isinstance(seeds, Tensor) else short_repr(seeds)
        raise TypeError(f"seeds must be an int64 tensor [B], one per image, got {given}")
    if not len(seeds):
        raise ValueError("seeds must hold one number per image, got none")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, or None for the plain softmax, got {short_repr(sampling)}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function of a Progress, or None, got {short_repr(callback)}")


class Run:
    """One call of a loop.

    Args:
        device: on which the passes run.
        total: N.
        callback: called after every pass; returning False stops the run. Its exceptions propagate.
        profile: on CUDA, synchronize between parts to measure their seconds.

    Attributes:
        passes: number of target passes so far; after `wait`, without those that a GPU ran after all images were complete.
        finished: whether the loop should end: all images are complete, the callback stopped it, or there were as many passes as
            tokens (each pass commits at least one).
        stopped: whether the callback stopped the run before all images were complete.
    """

    def __init__(self, device: torch.device, total: int, callback: Callback | None = None, profile: bool = False):
        self.total, self.callback = total, callback
        self.passes, self.finished, self.stopped = 0, False, False
        self._clock, self._finite_check = Clock(device, profile), _FiniteCheck(device)

    @property
    def synchronizes_parts(self) -> bool:
        """Whether the device is synchronized between parts."""
        return self._clock.measures_parts and self._clock.device.type == "cuda"

    def time_part(self, name: str) -> AbstractContextManager[None]:
        """Add the time of the block to the part `name`."""
        return self._clock.measure(name)

    def end_pass(self, sums: Tensor, position: Tensor, tokens: Tensor, length: Tensor, count: Tensor) -> None:
        """Finish a pass.

        Args:
            sums: float32 `[B, T]`, finite where all logits of a row are: their sum.
            position: int64 `[B, T]`, the position that each row predicts; values past N are ignored.
            tokens: int64 `[B, >= N]`, not an inference tensor, because the callback may write to it.
            length: int64 `[B]`, number of tokens generated.
            count: int64 `[B]`, number committed by this pass.

        Raises:
            NonFiniteLogitsError: if logits of this pass, or on a GPU of an earlier one, are not finite.
        """
        self.passes += 1
        complete = self._finite_check.submit(sums, position, length, self.total, self.passes)
        if self.callback:
            with normal_tensors():
                progress = Progress(self.passes, tokens[:, : self.total], length.clone(), self.total, count.clone())
                self.stopped = self.callback(progress) is False and not complete
        self.finished = complete or self.stopped or self.passes >= self.total

    def wait(self) -> None:
        """Wait for pending checks.

        Raises:
            NonFiniteLogitsError: if a pending check fails, so that no image results from non-finite logits.
        """
        self._finite_check.flush()
        if (completed := self._finite_check.completed) is not None:
            self.passes, self.stopped = min(self.passes, completed), False  # the callback stopped what was complete

    def finish(self, stats: DecodeStats) -> None:
        """Wait for pending checks, and record passes and seconds in `stats`; raises like `wait`."""
        self.wait()
        stats.passes, stats.stopped = self.passes, self.stopped
        stats.seconds, stats.seconds_by_part = self._clock.read() - self._clock.started, dict(self._clock.parts)


class Clock:
    """Wall-clock time by part, measured where the host waits for the device anyway, or on request.

    Attributes:
        timer: returns seconds; a measurement on a busy machine may replace it by process time.
        read: returns the time, on a GPU after what it has to do.
    """

    timer = staticmethod(time.perf_counter)

    def __init__(self, device: torch.device, profile: bool):
        self.device = device
        self.read = self._read_device if device.type == "cuda" else self.timer
        self.measures_parts = profile or device.type != "cuda"
        self.parts: dict[str, float] = defaultdict(float)
        self.started = self.read()

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


_MAX_QUEUED_PASSES = 8  # limit of passes queued on a GPU before the host waits for the oldest; bounds passes after the end


class _FiniteCheck:
    """Checks whether all images are finished and all logits finite, reading the device late enough not to wait for it.

    Attributes:
        completed: number of the first pass after which all images were finished, once that is known.
    """

    def __init__(self, device: torch.device):
        self.synchronous = device.type != "cuda"
        self.queued: list[tuple[Any, Tensor, int]] = []
        self.total = 0
        self.completed: int | None = None

    def submit(self, sums: Tensor, position: Tensor, length: Tensor, total: int, step: int) -> bool:
        """Return True if a completed pass has finished every image."""
        self.total = total
        if self.synchronous and all(math.isfinite(each) for row in sums.tolist() for each in row):  # mostly; fewer operations
            self._note_length(min(length.tolist()), step)
            return self.completed is not None
        bad = ~sums.isfinite() & (position < total)
        where = torch.where(bad, position, total).amin()
        report = torch.stack([where, length.amin()])
        if self.synchronous:
            self._read(report, step)
        else:
            self.queued.append((*self._send(report), step))
        while self.queued and (len(self.queued) > _MAX_QUEUED_PASSES or self.queued[0][0].query()):
            event, host, seen = self.queued.pop(0)
            event.synchronize()
            self._read(host, seen)
        return self.completed is not None

    @staticmethod
    def _send(report: Tensor) -> tuple[torch.cuda.Event, Tensor]:
        """Copy a report to the host. Returns the event after which the tensor contains it."""
        host = torch.empty(2, dtype=torch.int64, pin_memory=True)
        host.copy_(report, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(report.device))  # of this device, which need not be the current one
        return event, host

    def flush(self) -> None:
        """Wait for all pending checks."""
        for event, host, step in self.queued:
            event.synchronize()
            self._read(host, step)
        self.queued.clear()

    def _read(self, report: Tensor, step: int) -> None:
        position, shortest = report.tolist()
        if position < self.total:
            raise NonFiniteLogitsError(describe_non_finite_logits(position, self.total, step))
        self._note_length(shortest, step)

    def _note_length(self, shortest: int, step: int) -> None:
        if shortest >= self.total and self.completed is None:
            self.completed = step

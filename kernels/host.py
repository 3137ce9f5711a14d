"""The host's side of passes: torch's modes, whether passes are captured, seconds by part, reports without waiting."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict, deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

EAGER_VARIABLE = "VARGEN_EAGER"


class normal_tensors(contextlib.ContextDecorator):
    """Make normal tensors inside `inference_mode_for`, for use after it: they may be written to and used in training.

    A class, because passes enter it, and a generator takes several times as long.
    """

    def __enter__(self) -> None:
        self._modes = torch.inference_mode(False), torch.no_grad()
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def _recreate_cm(self) -> normal_tensors:  # each call of a decorated function has its own
        return normal_tensors()


def inference_mode_for(device: torch.device) -> AbstractContextManager[None]:
    """Run passes without gradients: in torch's inference mode on a CPU, where it lowers the cost of each operation.

    Elsewhere in `no_grad`: the host is not the bottleneck there, and offloaded weights, which are moved during a pass, could
    not be trained afterwards.
    """
    return torch.inference_mode() if device.type == "cpu" else torch.no_grad()


def captures_passes(device: torch.device) -> bool:
    """Return whether passes on this device are captured as CUDA graphs: on NVIDIA GPUs, unless VARGEN_EAGER is 1."""
    value = os.environ.get(EAGER_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{EAGER_VARIABLE} must be 0 or 1, got {value!r}")
    return device.type == "cuda" and torch.version.cuda is not None and value != "1"


def explain_capture(device: torch.device) -> str:
    """Describe whether passes on this device are captured."""
    if captures_passes(device):
        return f"captured as CUDA graphs; {EAGER_VARIABLE}=1 runs them one by one"
    return f"run one by one: {f'{EAGER_VARIABLE}=1' if device.type == 'cuda' else 'capture is for NVIDIA GPUs'}"


def is_hooked(module: Any) -> bool:
    """Whether hooks of accelerate or diffusers move or cast the weights of this very module: a parent may not read them."""
    return hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")


# -- time and reports ---------------------------------------------------------------------------------------------------


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


class Reports:
    """What the host needs to know of passes, in the order of the passes.

    On a GPU a report is read while the next pass runs, so that the host does not wait for the device.
    """

    def __init__(self, device: torch.device):
        self.is_late = device.type == "cuda"
        self._sent: deque[tuple[Tensor, Any, torch.cuda.Event | None]] = deque()

    def send(self, report: Tensor, about: Any) -> None:
        """Send a report of numbers; `about` is returned with it."""
        event = None
        if report.device.type == "cuda":
            host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
            host.copy_(report, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(report.device))  # of this device, which need not be the current one
            report = host
        self._sent.append((report, about, event))

    def receive(self, keep_newest: bool) -> tuple[list[Any], Any] | None:
        """Return the oldest report, after waiting for it; None if there is none, or only the newest, if that is kept."""
        if len(self._sent) <= (self.is_late and keep_newest):
            return None
        report, about, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        return report.tolist(), about

"""Reports of passes to the host, which does not wait for a GPU to get them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


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

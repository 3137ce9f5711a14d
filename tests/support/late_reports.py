"""A device that is behind: what a pass reports to the host is there later, as on a GPU, and more passes run meanwhile."""

import pytest
import torch
from torch import Tensor

from vargen.decoding.harness import _FiniteCheck


class LateEvent:
    """Of a report that is there when it is asked for the n-th time."""

    def __init__(self, n: int):
        self.n = n

    def query(self) -> bool:
        self.n -= 1
        return self.n < 0

    def synchronize(self) -> None:
        self.n = 0


def delay_reports(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    """Let loops on a CPU read the report of a pass only after so many queries, or when too many are queued."""
    start = _FiniteCheck.__init__

    def start_late(self: _FiniteCheck, device: torch.device) -> None:
        start(self, device)
        self.synchronous = False

    def send(report: Tensor) -> tuple[LateEvent, Tensor]:
        return LateEvent(queries), report

    monkeypatch.setattr(_FiniteCheck, "__init__", start_late)
    monkeypatch.setattr(_FiniteCheck, "_send", staticmethod(send))

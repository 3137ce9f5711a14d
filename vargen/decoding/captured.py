"""The sequential loop as a CUDA graph: one replay a pass, in which the host launches nothing else.

A pass of one token is some hundred small kernels, which the host takes longer to launch than a GPU to run. Captured once, they
are launched together. That takes what the loop keeps anyway: shapes that are the same in every pass, no value that the host
reads, and tensors that stay where they are. Passes that draft are not captured: their drafters make new tensors, and their
coins depend on the number of the pass, which would be frozen.

Asked for by VARGEN_CUDA_GRAPHS=1. Shape suffixes: B images, T fed tokens of one pass, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

VARIABLE = "VARGEN_CUDA_GRAPHS"
_WARM = 2  # passes before the capture: what they compile and allocate cannot be made in one

Pass = Callable[[], tuple[Tensor, ...]]


class Graph(Protocol):
    """A recorded pass."""

    def capture(self, run: Pass) -> tuple[Tensor, ...]:
        """Record what `run` does, without doing it; returns the tensors that every replay writes."""

    def replay(self) -> None:
        """Do it."""


def asked_for(device: torch.device) -> bool:
    """Whether sequential passes on this device are to be captured.

    Raises:
        ValueError: if VARGEN_CUDA_GRAPHS is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE, "") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1" and device.type == "cuda"


class CUDAGraph:
    """A `Graph` of the present device."""

    def __init__(self) -> None:
        self._graph: Any = torch.cuda.CUDAGraph()

    def capture(self, run: Pass) -> tuple[Tensor, ...]:
        with torch.cuda.graph(self._graph):
            return run()

    def replay(self) -> None:
        self._graph.replay()


class Replayed:
    """A pass that is run a few times, then captured, and replayed from then on.

    Args:
        run: one pass. It reads and writes tensors that stay where they are, reads no value of them on the host, and returns
            tensors.
        graph: makes the graph, when it is needed.
    """

    def __init__(self, run: Pass, graph: Callable[[], Graph] = CUDAGraph):
        self.run, self._make = run, graph
        self.passes = 0
        self._graph: Graph | None = None
        self._made: tuple[Tensor, ...] = ()

    def __call__(self) -> tuple[Tensor, ...]:
        """Do a pass; what it returns is overwritten by the next one."""
        self.passes += 1
        if self.passes <= _WARM:
            return self.run()
        if self._graph is None:
            self._graph = self._make()
            self._made = self._graph.capture(self.run)
        self._graph.replay()
        return self._made

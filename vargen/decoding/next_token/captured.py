"""Passes of the token loop as a CUDA graph: one replay per pass, with no other kernel launch from the host.

A pass consists of a hundred or more small kernels, and the host takes longer to launch them than a GPU to run them. Captured
once, they are launched together: drafting, the target pass, verification, commit, and the update of the drafter. Capture
requires shapes that are the same in every pass, no value read by the host, and tensors at fixed addresses, which
`vargen.decoding.next_token.carried` provides. The device counts the passes for their noise.

Enabled by VARGEN_CUDA_GRAPHS=1. Passes that cannot be captured run one by one, with a warning that gives the reason:

- the host selects in each pass what is drafted, by time or by values. On a GPU, windows, lengths and trees that follow measured
  costs are selected once, so none of vargen's own methods does this;
- a pass reads values on the host, or a state holds something that only the host can change, such as a generator;
- weights are moved between passes, as with offloading, or parts are timed (`profile`).

Passes of next-scale models have growing shapes and are not captured.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from vargen.decoding.next_token.carried import CannotCarryError, Carried, Snapshot

logger = logging.getLogger("vargen")

VARIABLE = "VARGEN_CUDA_GRAPHS"
_WARM = 2  # minimum passes before capture: compilation and allocation cannot be captured
_PATIENCE = 4  # maximum, until a pass leaves the structure of the state unchanged and reads nothing on the host

Pass = Callable[[], tuple[Tensor, ...]]


class Graph(Protocol):
    """A recorded pass."""

    @staticmethod
    def watched() -> AbstractContextManager[list[str]]:
        """Context manager that yields a list of places where the host reads from the device."""

    def capture(self, run: Pass) -> tuple[Tensor, ...]:
        """Record `run` without executing it. Returns the tensors that every replay writes."""

    def replay(self) -> None:
        """Execute the recorded pass."""


def asked_for(device: torch.device) -> bool:
    """Return whether passes on this device should be captured.

    Raises:
        ValueError: if VARGEN_CUDA_GRAPHS is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE, "") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1" and device.type == "cuda"


def explain(device: torch.device) -> str:
    """Describe whether passes on this device are captured, and why."""
    if asked_for(device):
        return f"captured, by {VARIABLE}=1, but where the host chooses or reads in each pass, weights are moved, or scales grow"
    if device.type != "cuda":
        return f"not captured: CUDA graphs are for NVIDIA GPUs, and this runs on {device.type}"
    return f"not captured; {VARIABLE}=1 captures them"


class CUDAGraph:
    """A `Graph` of the current device."""

    def __init__(self) -> None:
        self._graph: Any = torch.cuda.CUDAGraph()

    @staticmethod
    @contextmanager
    def watched() -> Iterator[list[str]]:
        reads: list[str] = []
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield reads
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        for each in seen:
            if "called a synchronizing CUDA operation" in str(each.message):
                reads.append(f"{os.path.basename(each.filename)}:{each.lineno}")
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)

    def capture(self, run: Pass) -> tuple[Tensor, ...]:
        with torch.cuda.graph(self._graph):
            return run()

    def replay(self) -> None:
        self._graph.replay()


class Replayed:
    """A pass that runs a few times, is then captured, and is replayed from then on; if capture fails, it runs every time.

    Args:
        run: one pass, which returns tensors.
        roots: the objects that carry state from pass to pass, by name.
        graph: factory of the graph.
        refused: reason not to capture at all; None: capture.

    Attributes:
        refused: also set when a reason is found later.
    """

    def __init__(self, run: Pass, roots: Mapping[str, Any], graph: type[Graph] = CUDAGraph, refused: str | None = None):
        self.run, self._roots, self._kind = run, roots, graph
        self.refused: str | None = None
        self._warm = 0
        self._carried: Carried | None = None
        self._graph: Graph | None = None
        self._made: tuple[Tensor, ...] = ()
        if refused:
            self._refuse(refused)

    def __call__(self) -> tuple[Tensor, ...]:
        """Run a pass. The returned tensors are overwritten by the next one."""
        if self.refused is None and self._carried is None:
            return self._warmed()
        if self.refused is None and self._graph is None:
            self._capture()
        if self._graph is None:
            return self.run()
        self._graph.replay()
        return self._made

    def _warmed(self) -> tuple[Tensor, ...]:
        """Run a pass without a graph, and check whether the next one can be captured."""
        before = self._snapshot()
        with self._kind.watched() as reads:
            made = self.run()
        self._warm += 1
        after = self._snapshot()
        if before is None or after is None:
            return made
        trouble = before.difference(after)
        if trouble is None and reads:
            trouble = f"the host reads values in a pass, at {', '.join(dict.fromkeys(reads))}"
        if trouble is None and self._warm >= _WARM:
            try:
                self._carried = Carried(before, after)
            except CannotCarryError as error:
                self._refuse(str(error))
        elif trouble is not None and self._warm >= _PATIENCE:
            self._refuse(trouble)
        return made

    def _snapshot(self) -> Snapshot | None:
        if self.refused is None:
            try:
                return Snapshot(self._roots)
            except CannotCarryError as error:
                self._refuse(str(error))
        return None

    def _capture(self) -> None:
        assert self._carried is not None
        graph = self._kind()
        try:
            self._made = graph.capture(self._carried_pass)
        except (CannotCarryError, RuntimeError) as error:  # nothing was executed: run the passes one by one instead
            self._carried.restore()
            self._refuse(str(error))
        else:
            self._graph = graph

    def _carried_pass(self) -> tuple[Tensor, ...]:
        assert self._carried is not None
        made = self.run()
        self._carried.settle()
        return made

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        logger.warning("%s=1: passes are run one by one: %s", VARIABLE, reason)

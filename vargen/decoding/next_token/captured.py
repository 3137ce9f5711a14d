"""Passes of the token loop as a CUDA graph: one replay a pass, in which the host launches nothing else.

A pass is some hundred small kernels or more, which the host takes longer to launch than a GPU to run. Captured once, they are
launched together: drafting, the target, judging, committing, and what the drafter learns of it. That takes shapes that are the
same in every pass, no value that the host reads, and tensors that stay where they are, which
`vargen.decoding.next_token.carried` sees to;
the device counts the passes, for their coins.

Asked for by VARGEN_CUDA_GRAPHS=1. Passes that cannot be captured run one by one, as without it, and a warning says why:

- where the host chooses in each pass, by a clock or by values, what is drafted. On a GPU windows, lengths and trees that
  follow measured costs are chosen once, so of vargen's own methods none does;
- where a pass reads values on the host, or a state holds what only the host can change, such as a generator;
- where weights are moved between passes, as when they are offloaded, or parts are timed (`profile`).

Next-scale models have passes of growing shapes, which are not captured.
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
_WARM = 2  # passes before the capture, at least: what they compile and allocate cannot be made in one
_PATIENCE = 4  # and at most, until one leaves a state like that before it, and reads nothing any more

Pass = Callable[[], tuple[Tensor, ...]]


class Graph(Protocol):
    """A recorded pass."""

    @staticmethod
    def watched() -> AbstractContextManager[list[str]]:
        """Inside, what the host reads of the device gets into the list."""

    def capture(self, run: Pass) -> tuple[Tensor, ...]:
        """Record what `run` does, without doing it; returns the tensors that every replay writes."""

    def replay(self) -> None:
        """Do it."""


def asked_for(device: torch.device) -> bool:
    """Whether passes on this device are to be captured.

    Raises:
        ValueError: if VARGEN_CUDA_GRAPHS is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE, "") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1" and device.type == "cuda"


def explain(device: torch.device) -> str:
    """Whether passes on this device are captured, and why, in words."""
    if asked_for(device):
        return f"captured, by {VARIABLE}=1, but where the host chooses or reads in each pass, weights are moved, or scales grow"
    if device.type != "cuda":
        return f"not captured: CUDA graphs are for NVIDIA GPUs, and this runs on {device.type}"
    return f"not captured; {VARIABLE}=1 captures them"


class CUDAGraph:
    """A `Graph` of the present device."""

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
    """A pass that is run a few times, then captured, and replayed from then on; or run each time, where it cannot be.

    Args:
        run: one pass, which returns tensors.
        roots: by name the objects by which passes leave something to the next ones.
        graph: makes the graph, when it is needed.
        refused: why it is not to be captured at all; None: it is.

    Attributes:
        refused: also what was found out since.
    """

    def __init__(
        self, run: Pass, roots: Mapping[str, Any], graph: type[Graph] = CUDAGraph, refused: str | None = None
    ):
        self.run, self._roots, self._kind = run, roots, graph
        self.refused: str | None = None
        self._warm = 0
        self._carried: Carried | None = None
        self._graph: Graph | None = None
        self._made: tuple[Tensor, ...] = ()
        if refused:
            self._refuse(refused)

    def __call__(self) -> tuple[Tensor, ...]:
        """Do a pass; what it returns is overwritten by the next one."""
        if self.refused is None and self._carried is None:
            return self._warmed()
        if self.refused is None and self._graph is None:
            self._capture()
        if self._graph is None:
            return self.run()
        self._graph.replay()
        return self._made

    def _warmed(self) -> tuple[Tensor, ...]:
        """A pass one by one, and whether the next one can be captured."""
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
        except (CannotCarryError, RuntimeError) as error:  # nothing was done: it is done one by one instead
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

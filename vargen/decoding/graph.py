"""A pass as a CUDA graph: one replay, with no other kernel launch from the host.

A pass consists of some hundred small kernels, and the host takes longer to launch them than a GPU to run them. A pass only
writes into tensors that are allocated once, so it can be captured as it is. Enabled by VARGEN_CUDA_GRAPHS=1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch

from vargen.device import GRAPHS_VARIABLE

EAGER_PASSES = 2  # before a capture: compilation and allocation cannot be captured


class CUDAGraph:
    """What `CapturedPasses` needs of a GPU; the tests replace it."""

    @staticmethod
    def capture(run: Callable[[], object]) -> Callable[[], None]:
        """Record `run` without executing it. Returns a function that executes it."""
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            run()
        return graph.replay


class CapturedPasses:
    """Runs passes of several kinds, each eagerly at first, and then as a graph; if capture fails, eagerly from then on.

    Args:
        graph: class that captures passes.
        blocker: reason not to capture any, if one is known. The attribute is also set when a reason is found later.
    """

    def __init__(self, graph: type[CUDAGraph], blocker: str | None = None):
        self._graph = graph
        self._replays: dict[Hashable, Callable[[], None]] = {}
        self._eager: dict[Hashable, int] = {}
        self.blocker: str | None = None
        if blocker is not None:
            self._fall_back(blocker)

    def run(self, kind: Hashable, step: Callable[[], object]) -> None:
        """Run `step`, which writes into fixed tensors only; passes of one kind have the same shapes and numbers of the host."""
        if (replay := self._replays.get(kind)) is not None:
            replay()
            return
        step()
        count = self._eager[kind] = self._eager.get(kind, 0) + 1
        if self.blocker is None and count == EAGER_PASSES:
            try:
                self._replays[kind] = self._graph.capture(step)
            except RuntimeError as error:  # nothing was executed: passes go on eagerly
                self._fall_back(str(error))

    def _fall_back(self, reason: str) -> None:
        self.blocker = reason
        logging.getLogger("vargen").warning("%s=1: passes are run one by one: %s", GRAPHS_VARIABLE, reason)

"""A pass as a CUDA graph: one replay, with no other kernel launch from the host.

A pass consists of some hundred small kernels, and the host takes longer to launch them than a GPU to run them. A pass only
writes into tensors that are allocated once, so it can be captured as it is. NVIDIA GPUs do so unless VARGEN_EAGER=1.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from vargen.kernels.host import is_hooked

logger = logging.getLogger("vargen")

EAGER_PASSES = 2  # before a capture: compilation and allocation cannot be captured
_capturing = threading.Lock()  # a process may capture one graph at a time


class CUDAGraph:
    """What `CapturedPasses` needs of a GPU; the tests replace it. Its graphs share memory, as they never run at once."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """Take other memory for the next graphs: a pool is gone with the last graph that used it."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        """Record `run` without executing it. Returns a function that executes it."""
        graph, device = torch.cuda.CUDAGraph(), self._device
        options: Any = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}  # others may allocate
        with _capturing, torch.cuda.device(device):
            before = torch.cuda.current_stream(device)
            try:
                with torch.cuda.graph(graph, **options):
                    run()
            finally:
                torch.cuda.set_stream(before)  # which torch forgets if a capture fails

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay


class CapturedPasses:
    """Runs passes of several kinds, each eagerly at first, and then as a graph; if capture fails, eagerly from then on.

    A graph reads the memory where its networks were when it was captured. If they are moved or replaced, passes are captured
    again. Networks that do what a graph does not repeat, such as calling hooks, run eagerly as long as they do.

    Args:
        graph: captures passes.
        networks: all that a pass reads, but for tensors that the pass owns.
        blocker: reason not to capture any, if one is known.
    """

    def __init__(self, graph: CUDAGraph, networks: Sequence[nn.Module] = (), blocker: str | None = None):
        self._graph, self._networks = graph, networks
        self._never = blocker  # why nothing is captured any more
        self._replays: dict[Hashable, Callable[[], None]] = {}
        self._eager: dict[Hashable, int] = {}
        self._weights: list[ref[Tensor]] = []
        self._addresses: list[int] = []
        self._compiled: list[Any] = []  # code of the modules that are compiled
        self._hooked: str | None = None  # why nothing is captured at the moment
        self._warned: set[str] = set()
        self._warn(blocker)

    @property
    def is_active(self) -> bool:
        """Whether passes run as graphs."""
        return self._never is None and self._hooked is None

    def check_networks(self) -> None:
        """List the weights again, and whether a graph repeats what the networks do; called before images start."""
        self._weights = [ref(each) for network in self._networks for each in _list_memory(network)]
        self._hooked = _find_blocker(self._networks)
        self._warn(self._hooked)
        compiled = [module._compiled_call_impl for network in self._networks for module in network.modules()]
        if compiled != self._compiled:
            self._compiled = compiled
            self._forget()

    def run(self, kind: Hashable, step: Callable[[], object]) -> None:
        """Run `step`, which writes into fixed tensors only; passes of one kind have the same shapes and numbers of the host."""
        addresses = [0 if (weight := each()) is None else weight.data_ptr() for each in self._weights]
        if addresses != self._addresses:
            self._addresses = addresses
            self._forget()
        if self._hooked is not None:
            step()
            return
        if (replay := self._replays.get(kind)) is not None:
            replay()
            return
        step()
        count = self._eager[kind] = self._eager.get(kind, 0) + 1
        if self._never is None and count == EAGER_PASSES:
            try:
                self._replays[kind] = self._graph.capture(step)
            except RuntimeError as error:  # nothing was executed: passes go on eagerly
                self._never = str(error)
                self._warn(self._never)

    def _forget(self) -> None:
        self._replays.clear()
        self._eager.clear()
        self._graph.forget()

    def _warn(self, reason: str | None) -> None:
        if reason is not None and reason not in self._warned:
            self._warned.add(reason)
            logger.warning("passes are run one by one instead of as a CUDA graph: %s", reason)


def capture_passes(graph: CUDAGraph | None, networks: Sequence[nn.Module], is_timed: bool) -> CapturedPasses | None:
    """Return what runs passes as graphs, unless the host waits for their parts; None without what captures them."""
    return None if graph is None else CapturedPasses(graph, networks, "their parts are timed" if is_timed else None)


def _find_blocker(networks: Sequence[nn.Module]) -> str | None:
    """Return what a graph of these networks would not repeat; None if there is nothing."""
    for network in networks:
        for module in network.modules():
            if is_hooked(module) or module._forward_pre_hooks:
                return "weights are moved or cast by hooks in each pass"
            if module._forward_hooks:
                return "hooks run in each pass"
            if hasattr(module, "base_layer"):  # of peft; their strength is a number of the host
                return "adapters are loaded; merge them into the weights and unload them"
    return None


def _list_memory(network: nn.Module) -> Iterator[Tensor]:
    """List the tensors that hold the weights and buffers of a network; a quantized weight consists of several."""
    pending = [*network.parameters(), *network.buffers()]
    while pending:
        each = pending.pop()
        if hasattr(each, "__tensor_flatten__"):
            pending += [getattr(each, name) for name in each.__tensor_flatten__()[0]]
        else:
            yield each

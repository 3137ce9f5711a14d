"""Passes of the token loop as a CUDA graph: one replay per pass, with no other kernel launch from the host.

A pass consists of a hundred or more small kernels, and the host takes longer to launch them than a GPU to run them. A captured
pass launches them together: drafting, the target pass, verification, commit, and the update of the drafter.

A replay runs no Python and reads and writes the same memory as the capture. Passes are therefore functions from state to state,
and states are trees of dataclasses (`register_state`). Each tensor that a pass replaces gets a buffer at a fixed address, to
which the captured pass copies the new value. Tensors changed in place are left alone. Everything else must stay the same.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

logger = logging.getLogger("vargen")

GRAPHS_ENV = "VARGEN_CUDA_GRAPHS"
WARMUP_PASSES = 2  # minimum before capture: compilation and allocation cannot be captured
MAX_WARMUP_PASSES = 4  # until a pass leaves the structure of the state unchanged and reads nothing on the host

S = TypeVar("S")
Outputs = tuple[Tensor, ...]


def register_state(cls: type[S]) -> type[S]:
    """Class decorator: register a dataclass as part of the state of a pass, whose fields are then visible to `describe`.

    A subclass must be registered again.
    """
    pytree.register_dataclass(cls)
    return cls


class NotCapturableError(ValueError):
    """A pass cannot be captured as a graph."""


class Graph(Protocol):
    """A recorded pass."""

    @staticmethod
    def record_syncs() -> AbstractContextManager[list[str]]:
        """Context manager that yields a list of places where the host reads from the device."""

    def capture(self, run: Callable[[], Outputs]) -> Outputs:
        """Record `run` without executing it. Returns the tensors that every replay writes."""

    def replay(self) -> None:
        """Execute the recorded pass."""


def read_graph_setting(device: torch.device) -> bool:
    """Return whether passes on this device should be captured.

    Raises:
        ValueError: if VARGEN_CUDA_GRAPHS is neither 0 nor 1.
    """
    value = os.environ.get(GRAPHS_ENV, "") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{GRAPHS_ENV} must be 0 or 1, got {value!r}")
    return value == "1" and device.type == "cuda"


def explain_graphs(device: torch.device) -> str:
    """Describe whether passes on this device are captured, and why."""
    if read_graph_setting(device):
        return f"captured, by {GRAPHS_ENV}=1, unless the host chooses or reads in each pass, weights are moved, or scales grow"
    if device.type != "cuda":
        return f"not captured: CUDA graphs are for NVIDIA GPUs, and this runs on {device.type}"
    return f"not captured; {GRAPHS_ENV}=1 captures them"


class CUDAGraph:
    """A `Graph` of the current device."""

    def __init__(self) -> None:
        self._graph: Any = torch.cuda.CUDAGraph()

    @staticmethod
    @contextmanager
    def record_syncs() -> Iterator[list[str]]:
        syncs: list[str] = []
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield syncs
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        for each in caught:
            if "called a synchronizing CUDA operation" in str(each.message):
                syncs.append(f"{os.path.basename(each.filename)}:{each.lineno}")
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)

    def capture(self, run: Callable[[], Outputs]) -> Outputs:
        with torch.cuda.graph(self._graph):
            return run()

    def replay(self) -> None:
        self._graph.replay()


def describe_state(state: Any) -> dict[str, Any]:
    """Return, by path such as `state.images.length`, what must be the same in every pass.

    This is the form of tensors, the value of plain objects, and the identity of frozen dataclasses and of objects that declare
    `in_place = True`, which passes change only by writing to their tensors.

    Raises:
        NotCapturableError: if the state holds anything else.
    """
    found: dict[str, Any] = {}
    for path, leaf in _leaves(state).items():
        if isinstance(leaf, Tensor):
            found[path] = Tensor, leaf.shape, leaf.dtype, leaf.device
        elif isinstance(leaf, bool | int | float | str | bytes | Enum | torch.dtype | torch.device):
            found[path] = type(leaf), leaf
        elif getattr(leaf, "in_place", False) or getattr(getattr(leaf, "__dataclass_params__", None), "frozen", False):
            found[path] = type(leaf), id(leaf)
        else:
            raise NotCapturableError(f"{path} is a {type(leaf).__name__}, whose changes a graph would not repeat")
    return found


def find_change(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the first difference between two descriptions in words; None if there is none."""
    for path in sorted(before.keys() ^ after.keys()):
        return f"{path} exists only after some passes"
    for path, value in before.items():
        if after[path] != value:
            both = value[0] is after[path][0] is Tensor
            return f"{path} changes its {'shape or dtype' if both else 'value on the host'} from pass to pass"
    return None


def _leaves(state: Any) -> dict[str, Any]:
    return {f"state{pytree.keystr(path)}": leaf for path, leaf in pytree.tree_flatten_with_path(state)[0]}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class GraphedPass(Generic[S]):
    """A pass that runs eagerly a few times, is then captured, and is replayed from then on; if capture fails, it runs eagerly.

    Call it with the state that the previous call returned. It returns the next state and the outputs; tensors of both are
    overwritten by the next call.

    Args:
        step: one pass; it changes its state only by writing to tensors.
        graph: class of the graph.
        blocker: reason not to capture at all; None: capture.

    Attributes:
        blocker: also set when a reason is found later.
    """

    def __init__(self, step: Callable[[S], tuple[S, Outputs]], graph: type[Graph] = CUDAGraph, blocker: str | None = None):
        self.blocker: str | None = None
        self._step, self._graph_type = step, graph
        self._passes = 0
        self._replaced: set[str] | None = None  # paths of the tensors that passes replace; None during warm-up
        self._captured: tuple[Graph, S, Outputs] | None = None
        if blocker:
            self._fall_back(blocker)

    def __call__(self, state: S) -> tuple[S, Outputs]:
        if self.blocker is None and self._captured is None:
            if self._replaced is None:
                return self._warm_up(state)
            self._capture(state, self._replaced)
        if self._captured is None:
            return self._step(state)
        graph, state, outputs = self._captured
        graph.replay()
        return state, outputs

    def _warm_up(self, state: S) -> tuple[S, Outputs]:
        """Run a pass without a graph, and check whether the next one can be captured."""
        before, old = self._describe(state), _leaves(state)
        with self._graph_type.record_syncs() as syncs:
            state, outputs = self._step(state)
        self._passes += 1
        after = self._describe(state)
        if before is None or after is None:
            return state, outputs
        change = find_change(before, after)
        if change is None and syncs:
            change = f"the host reads values in a pass, at {', '.join(dict.fromkeys(syncs))}"
        if change is None and self._passes >= WARMUP_PASSES:
            self._replaced = {path for path, new in _leaves(state).items() if isinstance(new, Tensor) and new is not old[path]}
        elif change is not None and self._passes >= MAX_WARMUP_PASSES:
            self._fall_back(change)
        return state, outputs

    def _describe(self, state: S) -> dict[str, Any] | None:
        if self.blocker is None:
            try:
                return describe_state(state)
            except NotCapturableError as error:
                self._fall_back(str(error))
        return None

    def _capture(self, state: S, replaced: set[str]) -> None:
        """Capture a pass over fixed buffers. Nothing is executed, so that after a failure passes run eagerly from `state`."""
        description, leaves, spec = describe_state(state), _leaves(state), pytree.tree_structure(state)
        buffers = leaves | {path: leaves[path].clone(memory_format=torch.contiguous_format) for path in replaced}
        storages = {_storage(buffers[path]) for path in replaced}

        def run() -> Outputs:
            new_state, outputs = self._step(pytree.tree_unflatten(list(buffers.values()), spec))
            if change := find_change(description, describe_state(new_state)):
                raise NotCapturableError(change)
            new = {path: leaf for path, leaf in _leaves(new_state).items() if isinstance(leaf, Tensor)}
            moved = {path: leaf for path, leaf in new.items() if leaf is not buffers[path]}
            if others := moved.keys() - replaced:
                raise NotCapturableError(f"{min(others)} is replaced by some passes only")
            # Clone first what lies in a buffer: a pass may move a tensor from one place of the state to another.
            values = {path: leaf.clone() if _storage(leaf) in storages else leaf for path, leaf in moved.items()}
            for path, value in values.items():
                buffers[path].copy_(value)
            return outputs

        graph = self._graph_type()
        try:
            outputs = graph.capture(run)
        except (NotCapturableError, RuntimeError) as error:
            self._fall_back(str(error))
        else:
            self._captured = graph, pytree.tree_unflatten(list(buffers.values()), spec), outputs

    def _fall_back(self, reason: str) -> None:
        self.blocker = reason
        logger.warning("%s=1: passes are run one by one: %s", GRAPHS_ENV, reason)

"""Passes of the token loop as a CUDA graph: one replay per pass, with no other kernel launch from the host.

A pass consists of a hundred or more small kernels, and the host takes longer to launch them than a GPU to run them. Passes are
functions from state to state, and states are trees of dataclasses (`register_state`). A captured pass copies each tensor that
it replaces to a buffer at a fixed address. Everything else must stay the same; see `find_replaced`.

Enabled by VARGEN_CUDA_GRAPHS=1. Passes run one by one, with a warning that gives the reason, if the host selects what to draft,
reads values of the device, or changes a state in another way; if weights are moved between passes; or if parts are timed.
Passes of next-scale models have growing shapes and are not captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vargen.device import GRAPHS_VARIABLE, record_host_syncs

WARMUP_PASSES = 2  # minimum before capture: compilation and allocation cannot be captured
MAX_WARMUP_PASSES = 4  # until a graph could repeat a pass
S = TypeVar("S")
Outputs = tuple[Tensor, ...]


def register_state(cls: type[S]) -> type[S]:
    """Class decorator: register a dataclass as part of the state of a pass. A subclass must be registered again."""
    pytree.register_dataclass(cls)
    return cls


class CUDAGraph:
    """The two functions of a GPU that `GraphedPass` needs; the tests replace them."""

    record_syncs = staticmethod(record_host_syncs)

    @staticmethod
    def capture(run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Record `run` without executing it. Returns a function that executes it, and the tensors to which it writes."""
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            return graph.replay, run()


def find_leaves(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by path, such as `state.images.length`."""
    return {f"state{pytree.keystr(path)}": leaf for path, leaf in pytree.tree_flatten_with_path(state)[0]}


def find_replaced(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a pass replaced, given the leaves of the state before and after it.

    Raise RuntimeError if a graph cannot repeat the pass: tensors must keep their form, plain values must stay equal, and other
    objects must stay the same and be frozen dataclasses or declare `in_place = True`, so that only their tensors change.
    """
    if paths := before.keys() ^ after.keys():
        raise RuntimeError(f"{min(paths)} exists only after some passes")
    for path, new in after.items():
        old, what = before[path], "value on the host"
        if isinstance(new, Tensor) and isinstance(old, Tensor):
            same, what = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device), "shape or dtype"
        elif isinstance(new, int | float | str | torch.dtype | torch.device):
            same = type(old) is type(new) and old == new
        elif getattr(new, "in_place", False) or getattr(getattr(new, "__dataclass_params__", None), "frozen", False):
            same = old is new
        else:
            raise RuntimeError(f"{path} is a {type(new).__name__}, whose changes a graph would not repeat")
        if not same:
            raise RuntimeError(f"{path} changes its {what} from pass to pass")
    return {path: new for path, new in after.items() if isinstance(new, Tensor) and new is not before[path]}


class GraphedPass(Generic[S]):
    """A pass that runs eagerly a few times, is then captured, and is replayed from then on; if capture fails, it runs eagerly.

    Call it with the state that the previous call returned. The next call overwrites the tensors of the result.

    Args:
        step: one pass, from a state to the next one and the outputs. It changes its argument only by writing to tensors.
        graph: class that captures it.
        blocker: reason not to capture it, if one is known. The attribute is also set when a reason is found later.
    """

    def __init__(self, step: Callable[[S], tuple[S, Outputs]], graph: type[CUDAGraph], blocker: str | None = None):
        self._step, self._graph, self._passes = step, graph, 0
        self._captured: tuple[S, Callable[[], None], Outputs] | None = None
        self.blocker: str | None = None
        if blocker is not None:
            self._fall_back(blocker)

    def __call__(self, state: S) -> tuple[S, Outputs]:
        if self._captured is not None:
            state, replay, outputs = self._captured
            replay()
            return state, outputs
        if self.blocker is not None:
            return self._step(state)
        before = find_leaves(state)
        with self._graph.record_syncs() as syncs:
            state, outputs = self._step(state)
        self._passes += 1
        try:
            replaced = find_replaced(before, find_leaves(state))
            if syncs:
                raise RuntimeError(f"the host reads values in a pass, at {', '.join(dict.fromkeys(syncs))}")
            if self._passes >= WARMUP_PASSES:
                self._passes = MAX_WARMUP_PASSES  # a failed capture is not repeated
                self._captured = self._capture(state, replaced)
        except RuntimeError as error:
            if self._passes >= MAX_WARMUP_PASSES:
                self._fall_back(str(error))
        return state, outputs

    def _capture(self, state: S, replaced: dict[str, Tensor]) -> tuple[S, Callable[[], None], Outputs]:
        """Capture the next passes over fixed buffers. Nothing is executed: after a failure, passes run eagerly from `state`."""
        buffers = {path: tensor.clone() for path, tensor in replaced.items()}
        leaves = find_leaves(state) | buffers
        fixed: S = pytree.tree_unflatten(list(leaves.values()), pytree.tree_structure(state))

        def run() -> Outputs:
            new_state, outputs = self._step(fixed)
            new = find_replaced(leaves, find_leaves(new_state))
            if others := new.keys() - buffers.keys():
                raise RuntimeError(f"{min(others)} is replaced by some passes only")
            # Clone all values before writing: a pass may move a tensor from one place of the state to another.
            for path, value in [(path, tensor.clone()) for path, tensor in new.items()]:
                buffers[path].copy_(value)
            return outputs

        return fixed, *self._graph.capture(run)

    def _fall_back(self, reason: str) -> None:
        self.blocker = reason
        logging.getLogger("vargen").warning("%s=1: passes are run one by one: %s", GRAPHS_VARIABLE, reason)

"""A graph without a GPU: every operation of a pass is written down with the tensors that it took and made, and is repeated on
the same tensors. As in a CUDA graph, numbers of the host are those of the recording, and Python does not run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of them "resolve_conj" begins `tolist` and `numpy`, in inference mode.
_READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "resolve_conj")


class HostReadError(RuntimeError):
    """What a CUDA graph refuses while it is captured."""


def _read(operation: Any, args: Any) -> bool:
    """Whether the host waits for a device: for a value or, at the end of `torch.tensor` of a list, for a copy of its numbers. A
    number alone, as in `x[:, 0] = 1`, fills without a copy."""
    name = operation.overloadpacket.__name__
    return name in _READS or (name == "lift_fresh" and args[0].dim() > 0)


class _Reads(TorchDispatchMode):
    def __init__(self, reads: list[str]):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _read(operation, args):
            self.reads.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


class RecordedGraph(TorchDispatchMode):
    """Stands in for `vargen.decoding.next_token.graphs.CUDAGraph`.

    Class attributes:
        made: graphs that were captured. replays: of all of them. before: called before each operation that is recorded.
    """

    made = replays = 0
    before: Callable[[str], None] = staticmethod(lambda name: None)

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []

    @staticmethod
    @contextmanager
    def record_syncs() -> Iterator[list[str]]:
        reads: list[str] = []
        with _Reads(reads):
            yield reads

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        type(self).before(operation.overloadpacket.__name__)
        if _read(operation, args):
            raise HostReadError(f"{operation.overloadpacket.__name__} reads a value on the host")
        out = operation(*args, **kwargs)
        given = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        fresh = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        views = all(_memory(each) in given for each in fresh)
        if not views or operation._schema.is_mutable:
            self.operations.append((operation, args, kwargs, [] if operation._schema.is_mutable else fresh))
        return out

    @classmethod
    def capture(cls, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        """As a CUDA graph, it does nothing yet: what the recording changed is put back."""
        cls.made += 1
        changed = _Changed()
        try:
            with changed, cls() as graph:
                return graph.replay, run()
        finally:
            changed.undo()

    def replay(self) -> None:
        type(self).replays += 1
        for operation, args, kwargs, kept in self.operations:
            made = [each for each in tree_leaves(operation(*args, **kwargs)) if isinstance(each, Tensor)]
            for old, new in zip(kept, made, strict=False):
                old.copy_(new)


class _Changed(TorchDispatchMode):
    """Remembers what memory held before an operation wrote to it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation._schema.is_mutable:
            for each in tree_leaves((args, kwargs or {})):
                if isinstance(each, Tensor) and _memory(each) not in self.held:
                    whole = torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())
                    self.held[_memory(each)] = whole, whole.clone()
        return operation(*args, **(kwargs or {}))

    def undo(self) -> None:
        for whole, value in self.held.values():
            whole.copy_(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

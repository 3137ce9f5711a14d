"""A graph without a GPU: every operation of a pass is written down with the tensors that it took and made, and is repeated on
the same tensors. As in a CUDA graph, numbers of the host are those of the recording, and Python does not run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vargen import capture

# Of them "resolve_conj" begins `tolist` and `numpy`, in inference mode. The results of the last ones have as many elements as
# the values say.
_READS = (
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "resolve_conj"),
    *("nonzero", "argwhere", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive"),
)


class HostReadError(RuntimeError):
    """What a CUDA graph refuses while it is captured."""


def refuse_reads(operation: Any, args: Any, kwargs: Any) -> None:
    """Raise HostReadError if the host waits for a device in an operation."""
    name = operation.overloadpacket.__name__
    if name in _READS or _depends_on_values(name, args, kwargs):
        raise HostReadError(f"{name} reads a value on the host")


def _depends_on_values(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for a device, given these arguments: for a value or, at the end of `torch.tensor` of a list, for a
    copy of its numbers. A number alone, as in `x[:, 0] = 1` and `x[mask] = 1`, fills without a copy."""
    if name == "lift_fresh":
        return bool(args[0].dim() > 0)
    if name == "where":
        return len(args) == 1
    if name == "one_hot":
        return len(args) == 1 and not kwargs
    if name == "repeat_interleave":
        return isinstance(args[:2][-1], Tensor) and "output_size" not in kwargs
    if name in ("index", "index_put", "index_put_"):
        is_mask = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        return is_mask and (name == "index" or args[2].numel() > 1)
    return False


def list_leaves(given: Any) -> list[Any]:
    """List the tensors and numbers that an operation takes or makes; faster than torch's own function."""
    if isinstance(given, dict):
        given = tuple(given.values())
    return [leaf for each in given for leaf in list_leaves(each)] if isinstance(given, list | tuple) else [given]


def list_tensors(given: Any) -> list[Tensor]:
    return [each for each in list_leaves(given) if isinstance(each, Tensor)]


@contextmanager
def captured_passes() -> Iterator[None]:
    """Engines that are made in the block capture their passes as a `RecordedGraph`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "make_graphs", lambda device: RecordedGraph)
        patch.setattr("vargen.pipelines.engines.captures_passes", lambda device: True)
        yield


class RecordedGraph(TorchDispatchMode):
    """Stands in for `vargen.kernels.graph.CUDAGraph`.

    Class attributes:
        made: graphs that were captured. replays: of all of them. before: called before each operation that is recorded.
    """

    made = replays = 0
    before: Callable[[str], None] = staticmethod(lambda name: None)

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        type(self).before(operation.overloadpacket.__name__)
        refuse_reads(operation, args, kwargs)
        out = operation(*args, **kwargs)
        given, fresh = {memory(each) for each in list_tensors((args, kwargs))}, list_tensors(out)
        views = all(memory(each) in given for each in fresh)
        if not views or operation._schema.is_mutable:
            self.operations.append((operation, args, kwargs, [] if operation._schema.is_mutable else fresh))
        return out

    @classmethod
    def forget(cls) -> None: ...

    @classmethod
    def capture(cls, run: Callable[[], object]) -> Callable[[], None]:
        """As a CUDA graph, it does nothing yet: what the recording changed is put back."""
        changed = _Changed()
        try:
            with changed, cls() as graph:
                run()
        finally:
            changed.undo()
        cls.made += 1
        return graph.replay

    def replay(self) -> None:
        type(self).replays += 1
        for operation, args, kwargs, kept in self.operations:
            for old, new in zip(kept, list_tensors(operation(*args, **kwargs)), strict=False):
                old.copy_(new)


class _Changed(TorchDispatchMode):
    """Remembers what memory held before an operation wrote to it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation._schema.is_mutable:
            for each in list_tensors((args, kwargs or {})):
                if memory(each) not in self.held:
                    whole = torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())
                    self.held[memory(each)] = whole, whole.clone()
        return operation(*args, **(kwargs or {}))

    def undo(self) -> None:
        for whole, value in self.held.values():
            whole.copy_(value)


def memory(tensor: Tensor) -> int:
    """Identify the memory of a tensor, which its views share."""
    return tensor.untyped_storage()._cdata

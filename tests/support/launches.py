"""The operations of a pass that a GPU would run as kernels, counted on a CPU: those that neither allocate nor make views.

A lower bound of kernels: a sort is several. `F.rms_norm`, one kernel on a GPU, counts as one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from recorded_graph import list_tensors, memory
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "resolve_conj", "lift_fresh", "detach", "alias")


class CountLaunches(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        given, made = {memory(each) for each in list_tensors((args, kwargs or {}))}, list_tensors(out)
        is_view = made and all(memory(each) in given for each in made) and not operation._schema.is_mutable
        if not is_view and (name := operation.overloadpacket.__name__) not in ALLOCATIONS:
            self.names[name] += 1
        return out

    def rms_norm(self, *args: Any) -> torch.Tensor:
        """Stands in for `F.rms_norm`, which is several operations on a CPU."""
        self.names["rms_norm"] += 1
        with _disable_current_modes():
            return torch.rms_norm(*args)

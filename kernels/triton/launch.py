"""Launching kernels: compiled for a GPU, or in Triton's interpreter, which runs them in NumPy for tests on a CPU.

Every launch goes through `launch`, so that launches can also be recorded: `benchmarks/kernels_static` compiles the recorded
ones for GPUs that are not present.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Read once, as Triton does at import: kernels are built for one or the other.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def needs_upcast(dtype: torch.dtype) -> bool:
    """Whether a kernel must convert loaded values to float32: in bfloat16, the interpreter silently gives wrong results."""
    return INTERPRETED and dtype == torch.bfloat16


@dataclass(frozen=True)
class Launch:
    """A recorded launch: the kernel, its grid, its positional arguments, and its constants and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__.lstrip("_")

    @property
    def num_programs(self) -> int:
        count = 1
        for size in self.grid:
            count *= size
        return count


_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel` on the device of its first argument."""
    if not torch.compiler.is_compiling():
        record = _recorded.get()
        if record is not None:
            record.append(Launch(kernel, grid, args, options))
            return
        first: Tensor = args[0]
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                kernel[grid](*args, **options)
            return
    kernel[grid](*args, **options)


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Record the launches of the block in a list instead of running them. Tensors can be on the device "meta"."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)

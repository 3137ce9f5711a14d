"""Where networks run, in which dtype, and on how many CPU threads. Importing this module imports no torch.

By which path they run there is decided in `vargen.kernels.dispatch`.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vargen.values import short_repr

if TYPE_CHECKING:
    import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # variables by which people choose; torch reads them


def set_passive_openmp_wait() -> None:
    """Let OpenMP threads sleep while they wait for work. `import vargen` calls this; once torch is imported it has no effect.

    By default they spin, and beside other programs that is ruinous: two threads on two busy cores took 33 to 97 ms for a pass
    of one token that takes 12 ms with one, and 14 to 26 ms with two that sleep. A user's own setting stays.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def cpu_model() -> str:
    """Name of the processor, as its system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    except OSError:  # no Linux
        pass
    return platform.processor() or platform.machine()


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores() -> int:
    """Of the cores, how many are not two threads of one; all of them where the system does not tell."""
    siblings = set()
    for core in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text())
        except OSError:
            return available_cores()
    return len(siblings) or available_cores()


class _Threads:
    """What is in force. `before` is torch's number while some work has another one, nested or beside other work."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fixed: int | None = None  # by `set_threads`
        self.before = 0
        self.depth = 0  # blocks of `threads` that run
        self.own = threading.local()  # `count`: what a block around this thread's work has set


_state = _Threads()


def set_threads(count: int | None) -> None:
    """Let torch use `count` CPU threads from now on, whatever is measured; None leaves the choice to measurement.

    Raises:
        ValueError: for a count below 1 or above the machine's cores. More never pay, and very many end the process.
    """
    most = os.cpu_count() or 1
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise ValueError(f"threads must be a whole number from 1 to {most}, the cores of this machine, got {count!r}")
    import torch

    with _state.lock:
        _state.fixed = count
    torch.set_num_threads(count)


def user_thread_count() -> tuple[int, str] | None:
    """The number of threads that a person or a block around this one chose, and where; None where measurement may choose."""
    import torch

    if (count := getattr(_state.own, "count", None)) is not None:
        return count, "a block of vargen.device.threads"
    with _state.lock:
        if _state.fixed is not None:
            return _state.fixed, "--threads"
        for name in THREAD_VARIABLES:
            if os.environ.get(name, "").strip():
                return torch.get_num_threads(), name
        current = _state.before if _state.depth else torch.get_num_threads()
    # Torch begins with a thread for each core, or for each physical one; any other number was set by a call.
    return None if current in (available_cores(), max(physical_cores(), 2)) else (current, "torch.set_num_threads")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """`count` threads for the block, then torch's number from before. Threads of Python may do this beside each other."""
    import torch

    with _state.lock:
        if not _state.depth:
            _state.before = torch.get_num_threads()
        _state.depth += 1
    outer = getattr(_state.own, "count", None)
    _state.own.count = count
    torch.set_num_threads(count)
    try:
        yield
    finally:
        _state.own.count = outer
        with _state.lock:
            _state.depth -= 1
            torch.set_num_threads(_state.before if outer is None else outer)


def select_device(name: str | torch.device) -> torch.device:
    """The device to run on; `"auto"` takes a GPU where there is one.

    Raises:
        ValueError: for what is no device, or a GPU that torch does not see.
    """
    import torch

    gpus = torch.cuda.device_count()
    if isinstance(name, str) and name == "auto":
        name = "cuda" if gpus else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be auto, cpu, cuda or another device of torch, got {short_repr(name)}") from None
    if device.type == "cuda" and not 0 <= (device.index or 0) < gpus:  # torch wraps large ones to below 0
        seen = f"sees {gpus} GPUs" if gpus else "sees no GPU"
        raise ValueError(f"device must be cpu, auto or a GPU that is there: torch {seen}, got {str(device)!r}")
    return device


def check_compile(compile: bool, device: str | torch.device) -> None:
    """Raise ValueError if passes are to be compiled that run on a CPU.

    The compiler's code copies the cache for what a pass writes to it, which is over half of its time, and, because shapes are
    the same in every pass, attends to all slots: a pass of one token of the packaged model took 17 ms, and 5.5 ms eagerly.
    """
    import torch

    if compile and torch.device(device).type == "cpu":
        raise ValueError(
            "compile must be False on a CPU: compiled passes take longer there, because they copy the whole cache and attend "
            "to all of it; leave it out, or run on a GPU"
        )


def preferred_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """bfloat16 where hardware multiplies it; float32 on a CPU without such instructions, where bfloat16 is 7 times slower."""
    import torch

    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions: AVX-512 BF16, AMX, or Arm's. False where torch cannot tell."""
    import torch

    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))

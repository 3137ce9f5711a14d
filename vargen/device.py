"""Device, dtype and number of CPU threads of the networks. Importing this module does not import torch.

The choice between kernels and plain torch code is made in `vargen.kernels.dispatch`.
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

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # read by torch; users set the thread count by them


def set_passive_openmp_wait() -> None:
    """Make OpenMP threads sleep while they wait for work. `import vargen` calls this; it has no effect once torch is imported.

    By default they spin, which is very slow on a busy machine: with two cores busy, a one-token pass took 33 to 97 ms on two
    spinning threads, 14 to 26 ms on two sleeping threads and 12 ms on one thread. A value set by the user is kept.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def cpu_model() -> str:
    """Return the name of the processor as the operating system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def available_cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores() -> int:
    """Return the number of physical cores, counting hyperthreads once; all available cores if the system does not report it."""
    siblings = set()
    for core in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text())
        except OSError:
            return available_cores()
    return len(siblings) or available_cores()


class _Threads:
    """The current thread setting. `before` is torch's own number, kept while nested or concurrent work uses another one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fixed: int | None = None  # set by `set_threads`
        self.before = 0
        self.depth = 0  # number of active `threads` blocks
        self.own = threading.local()  # `count`: the number set by a block around this thread's work


_state = _Threads()


def set_threads(count: int | None) -> None:
    """Fix the number of CPU threads that torch uses; None returns to autotuning.

    Raises:
        ValueError: `count` is below 1 or above the machine's cores. More are never faster, and very many crash the process.
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
    """Return the thread count chosen by the user or an enclosing block, and where it was set; None if it may be autotuned."""
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
    # Torch starts with one thread per logical or per physical core; any other number was set by a call.
    return None if current in (available_cores(), max(physical_cores(), 2)) else (current, "torch.set_num_threads")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use `count` threads within the block, then restore torch's previous number. Python threads may do this concurrently."""
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
    """Return the device to run on; `"auto"` selects a GPU if there is one.

    Raises:
        ValueError: `name` is not a device, or is a GPU that torch does not see.
    """
    import torch

    gpus = torch.cuda.device_count()
    if isinstance(name, str) and name == "auto":
        name = "cuda" if gpus else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be auto, cpu, cuda or another device of torch, got {short_repr(name)}") from None
    if device.type == "cuda" and not 0 <= (device.index or 0) < gpus:  # torch wraps large indices to negative ones
        seen = f"sees {gpus} GPUs" if gpus else "sees no GPU"
        raise ValueError(f"device must be cpu, auto or a GPU that is there: torch {seen}, got {str(device)!r}")
    return device


def check_compile(compile: bool, device: str | torch.device) -> None:
    """Raise ValueError if compiled passes are requested on a CPU.

    The compiled code copies the cache to write to it, which is over half of its time, and, because all passes have the same
    shapes, attends to every slot: a one-token pass of the packaged model took 17 ms compiled and 5.5 ms in eager mode.
    """
    import torch

    if compile and torch.device(device).type == "cpu":
        raise ValueError(
            "compile must be False on a CPU: compiled passes take longer there, because they copy the whole cache and attend "
            "to all of it; leave it out, or run on a GPU"
        )


def preferred_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """Return bfloat16 if the hardware multiplies it, else float32: a CPU without it is 7 times slower in bfloat16."""
    import torch

    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 matrix instructions (AVX-512 BF16, AMX or Arm's); False if torch cannot tell."""
    import torch

    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))

"""Device, dtype and CPU threads of forward passes. Importing this module does not import torch."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vargen.values import require_int, short_repr

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


@cache
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


@cache
def available_cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def physical_cores() -> int:
    """Return the number of physical cores, counting hyperthreads once, if the system reports it."""
    siblings = set()
    for core in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text())
        except OSError:
            return available_cores()
    return len(siblings) or available_cores()


class _Threads:
    """The current thread setting; `before` is torch's own number while blocks use another one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fixed: int | None = None  # set by `set_threads`
        self.before = 0
        self.depth = 0  # number of active `limit_threads` blocks
        self.local = threading.local()  # `count`: the number set by a block around this thread's work


_state = _Threads()


def set_threads(count: int | None) -> None:
    """Fix the number of CPU threads that torch uses; None changes nothing."""
    if count is not None:
        import torch

        count = require_int("threads", count, 1, os.cpu_count() or 1)
        with _state.lock:
            _state.fixed = count
        torch.set_num_threads(count)


def user_thread_count() -> tuple[int, str] | None:
    """Return the thread count that the user or a block chose, and where; None if it may be autotuned."""
    import torch

    if (count := getattr(_state.local, "count", None)) is not None:
        return count, "a block of vargen.device.limit_threads"
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
def limit_threads(count: int | None) -> Iterator[None]:
    """Use `count` threads within the block, also in concurrent Python threads; None changes nothing."""
    import torch

    if count is None:
        yield
        return
    with _state.lock:
        if not _state.depth:
            _state.before = torch.get_num_threads()
        _state.depth += 1
    outer = getattr(_state.local, "count", None)
    _state.local.count = count
    torch.set_num_threads(count)
    try:
        yield
    finally:
        _state.local.count = outer
        with _state.lock:
            _state.depth -= 1
            torch.set_num_threads(_state.before if outer is None else outer)


def select_device(name: str | torch.device) -> torch.device:
    """Return the device to run on; `"auto"` selects a GPU if there is one."""
    import torch

    gpus = torch.cuda.device_count()
    if isinstance(name, str) and name == "auto":
        name = "cuda" if gpus else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be auto, cpu, cuda or another device of torch, got {short_repr(name)}") from None
    if device.type == "cuda" and not 0 <= (device.index or 0) < gpus:  # torch wraps large indices to negative ones
        there = ", ".join(["auto", "cpu", *(f"cuda:{number}" for number in range(gpus))])
        raise ValueError(f"device must be one that torch sees ({there}), got {str(device)!r}")
    return device


def preferred_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """Return bfloat16 if the hardware multiplies it, else float32: a CPU without it is 7 times slower in bfloat16."""
    import torch

    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 matrix instructions (AVX-512 BF16, AMX or Arm's)."""
    import torch

    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def describe_machine() -> dict[str, Any]:
    """Return CPU, threads, load (runnable processes in the last minute), GPUs and torch version."""
    import torch

    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(number)
        gpus.append({"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)})
    return {
        "cpu": cpu_model(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "bfloat16_in_hardware": cpu_has_bfloat16(),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def describe_place(device: torch.device) -> str:
    """Return what a device is, such as "AMD EPYC, 2 cores", or the name of a GPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {available_cores()} cores"


def summarize_machine(machine: dict[str, Any], device: torch.device, dtype: torch.dtype) -> str:
    """Return one line for the head of a table."""
    place = f"{machine['cpu']}, CPU threads: {machine['threads']}"
    if device.type == "cuda":
        place = machine["gpus"][device.index or 0]["name"]
    return f"{place}, {str(dtype).removeprefix('torch.')}, torch {machine['torch']}"

"""Description of the machine that produced a measurement; a speed is meaningless without it."""

from __future__ import annotations

import contextlib
import os
import platform
from typing import Any

import torch

from vargen.device import cpu_has_bfloat16, cpu_model


def usable_cores() -> int:
    """Return the number of cores that all threads of this process may use; OMP_PROC_BIND pins each thread to one core."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    torch.empty(torch.get_num_threads() << 16).fill_(0)  # starts torch's threads, which are listed below
    threads = [int(thread) for thread in os.listdir("/proc/self/task")] if os.path.isdir("/proc/self/task") else [0]
    cores: set[int] = set()
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            cores |= os.sched_getaffinity(thread)
    return len(cores)


def load_average() -> float | None:
    """Return the number of runnable processes, averaged over the last minute; None if the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def describe_machine() -> dict[str, Any]:
    """Return CPU, threads, load, GPUs and torch version as plain values."""
    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(number)
        gpus.append({"name": found.name, "memory_gib": round(found.total_memory / 2**30, 1)})
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "load": load_average(),
        "bfloat16_in_hardware": cpu_has_bfloat16(),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def machine_line(machine: dict[str, Any], device: torch.device, dtype: torch.dtype) -> str:
    """Return one line for the head of a table."""
    place = f"{machine['cpu']}, {machine['threads']} CPU threads"
    if device.type == "cuda":
        place = machine["gpus"][device.index or 0]["name"]
    return f"{place}, {str(dtype).removeprefix('torch.')}, torch {machine['torch']}"

"""What the kernels cost as far as it can be known without a GPU.

    python -m benchmarks.kernels_static.costs [--json] [80] [90] [100]     # compute capabilities, by default all

Registers, spills and shared memory are read from what the compiler made for each GPU; programs and waves follow from the grid
and these. Bytes and operations are counted from shapes. The roofline's time is computed, bytes over bandwidth or operations
over rate, whichever is longer, from data sheets: no kernel can be quicker, and none was run.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, NamedTuple

import triton

from vargen.kernels.launch import Launch

from .aot import SHARED_LIMIT, Resources, compile_launch
from .shipped import KernelCase, list_cases


class GPU(NamedTuple):
    """From a data sheet: compute capability, multiprocessors, bytes a second, operations a second of two-byte products."""

    capability: int
    multiprocessors: int
    bandwidth: float
    rate: float


GPUS: dict[str, GPU] = {
    "A100 80 GB": GPU(80, 108, 2.04e12, 312e12),
    "H100 SXM": GPU(90, 132, 3.35e12, 989e12),
    "H200": GPU(90, 132, 4.8e12, 989e12),
    "B200": GPU(100, 148, 8.0e12, 2250e12),
}
_WIDE = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*, 0x10,|cp\.async\.c[ag]\.shared\.global[^;]*, 16")
_CORES = ("mma.sync", "wgmma", "tcgen05.mma")


def compile_once(launch: Launch, capability: int, made: dict[str, Resources]) -> Resources:
    """What a launch takes on a GPU; equal launches are compiled once."""
    kinds = [
        getattr(each, "dtype", (each == 1, each % 16 == 0) if isinstance(each, int) else type(each)) for each in launch.args
    ]
    key = f"{launch.name} {capability} {kinds} {sorted(launch.options.items())}"
    if key not in made:
        made[key] = compile_launch(launch, capability)
    return made[key]


def make_report(capabilities: tuple[int, ...] = tuple(SHARED_LIMIT), cases: list[KernelCase] | None = None) -> dict[str, Any]:
    """Make the report: every launch of the cases, by default of all, on every generation of GPUs, and the rooflines."""
    made: dict[str, Resources] = {}
    found = list_cases() if cases is None else cases
    kernels = [
        _describe_launch(case, launch, compile_once(launch, capability, made), capability)
        for case, launch in list_launches(found)
        for capability in capabilities
    ]
    return {"triton": triton.__version__, "kernels": kernels, "operations": [describe_operation(case) for case in found]}


def list_launches(found: list[KernelCase]) -> list[tuple[KernelCase, Launch]]:
    """Every launch, with its case; a case may have several."""
    return [(case, launch) for case in found for launch in case.launches]


def describe_operation(case: KernelCase) -> dict[str, Any]:
    """What can be said of a case without a compiler."""
    return {
        "operation": case.operation, "shape": case.shape, "bytes": case.bytes, "flops": case.flops,
        "launches": len(case.launches), "programs": [launch.num_programs for launch in case.launches],
        "roofline_microseconds": {
            name: round(1e6 * max(case.bytes / gpu.bandwidth, case.flops / gpu.rate), 3) for name, gpu in GPUS.items()
        },
    }  # fmt: skip


def _describe_launch(case: KernelCase, launch: Launch, found: Resources, capability: int) -> dict[str, Any]:
    resident = found.blocks_per_multiprocessor(capability)
    return {
        "operation": case.operation, "shape": case.shape, "kernel": launch.name, "capability": capability,
        "registers": found.registers, "spills": found.stack, "shared": found.shared, "shared_limit": SHARED_LIMIT[capability],
        "warps": found.warps, "programs": launch.num_programs, "resident": resident,
        "waves": {
            name: round(launch.num_programs / (resident * gpu.multiprocessors), 3)
            for name, gpu in GPUS.items() if gpu.capability == capability
        },
        "tensor_cores": any(name in found.ptx for name in _CORES),
        "wide_copies": len(_WIDE.findall(found.ptx)),
    }  # fmt: skip


def format_tables(document: dict[str, Any]) -> str:
    """The report as two tables of Markdown."""
    seen: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for each in document["kernels"]:
        seen.setdefault((each["kernel"], each["operation"], each["shape"]), {})[each["capability"]] = each
    lines = [
        "| kernel | shape | programs | warps | registers | spills | shared bytes | waves on H200 |",
        "|---|---|---:|---:|---|---|---|---:|",
    ]
    for (kernel, _, shape), by in seen.items():
        cells = [" / ".join(str(each[name]) for each in by.values()) for name in ("registers", "spills", "shared")]
        first = next(iter(by.values()))
        waves = by[90]["waves"]["H200"] if 90 in by else ""
        lines.append(f"| `{kernel}` | {shape} | {first['programs']} | {first['warps']} | {' | '.join(cells)} | {waves} |")
    lines += ["", f"| operation | shape | KB | MFLOP | {' | '.join(GPUS)} |", "|---|---|---:|---:|" + "---:|" * len(GPUS)]
    for each in document["operations"]:
        times = " | ".join(f"{value:.2f}" for value in each["roofline_microseconds"].values())
        size, work = each["bytes"] / 1e3, each["flops"] / 1e6
        lines.append(f"| {each['operation']} | {each['shape']} | {size:.1f} | {work:.1f} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    asked = tuple(each for each in SHARED_LIMIT if str(each) in sys.argv[1:])
    try:
        document = make_report(asked or tuple(SHARED_LIMIT))
    except RuntimeError as error:
        sys.exit(str(error))
    print(json.dumps(document) if "--json" in sys.argv[1:] else format_tables(document))

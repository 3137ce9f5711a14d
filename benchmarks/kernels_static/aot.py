"""Kernels compiled ahead of time for GPUs that need not be there, and what the compiler made of them.

Registers, spills and shared memory are read from the machine code; Triton does not refuse a kernel that needs more shared
memory than a GPU has until it is launched. Works where Triton is installed and not interpreting.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vargen.kernels.launch import INTERPRETED, Launch

# Bytes of shared memory that a block may have, by compute capability.
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}
_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: `registers` of a thread, `stack` bytes of a thread (spills), `shared` bytes of a block."""

    registers: int
    stack: int
    shared: int
    warps: int
    ptx: str

    def blocks_per_multiprocessor(self, capability: int) -> int:
        """How many blocks a multiprocessor holds at once, by its 65,536 registers, shared memory, and 64 warps."""
        shared = SHARED_LIMIT[capability] + 1024  # of which each block takes 1,024 itself
        by_registers = 65_536 // (-(-self.registers // 8) * 8 * 32 * self.warps)
        return max(1, min(by_registers, shared // (self.shared + 1024), 64 // self.warps, 32))


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile what was recorded, specialized as Triton would on a GPU: pointers and integers that 16 divides, integers of 1.

    Raises:
        RuntimeError: in a process where Triton interprets.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: this process interprets kernels and cannot compile them")
    kernel = launch.kernel
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    given = dict(zip(kernel.arg_names, launch.args, strict=False)) | launch.options
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (_is_one(value) and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[parameter.name] = _type(value)
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize):
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in launch.options.items() if name not in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _read_usage(made.asm["cubin"])
    return Resources(registers, stack, made.metadata.shared, made.metadata.num_warps, made.asm["ptx"])


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 1


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _read_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise RuntimeError(f"cuobjdump said nothing about registers: {text[:300]!r}")
    return int(found[1]), int(found[2])

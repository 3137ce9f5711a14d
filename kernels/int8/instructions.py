"""Instruction sets of CPUs for products of integers: which ones this CPU has, which one is used, and how it reads a matrix.

Imports neither torch nor Numba, but for what systems other than Linux do not tell.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from vargen.values import suggest_names

# By name, the flags of torch (or else of Linux) that a CPU with the instructions has.
_INSTRUCTIONS = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512_f", "avx512f"),
    "AVX-512 VNNI": ("avx512_vnni",),
    "AVX-VNNI": ("avx_vnni",),
    "AVX-512 BF16": ("avx512_bf16",),
    "AMX int8": ("amx_int8",),
    "AMX bf16": ("amx_bf16",),
    "Arm dot product": ("dot", "asimddp"),
    "Arm bf16": ("bf16",),
}
# The sets, fastest first, and what a CPU needs for each: one of these, or nothing. AVX-512 VNNI has the short vectors, too.
SETS = {
    "avx512-vnni": {"AVX-512 VNNI"},
    "avx-vnni": {"AVX-VNNI", "AVX-512 VNNI"},
    "avx2": {"AVX2"},
    "neon-dotprod": {"Arm dot product"},
    "plain": set[str](),
}


class Layout(NamedTuple):
    """How a matrix is packed: `columns` side by side, `together` consecutive inputs of each.

    `widened`: rows are read as int16. `offset`: added to the bytes of rows, where an instruction takes unsigned ones.
    """

    columns: int
    together: int
    widened: bool = False
    offset: int = 128


LAYOUTS = {
    "avx512-vnni": Layout(64, 4),
    "avx-vnni": Layout(32, 4),
    "avx2": Layout(32, 2, widened=True),
    "neon-dotprod": Layout(16, 4, offset=0),
    "plain": Layout(32, 2, widened=True),
}


@lru_cache(maxsize=1)
def cpu_instructions() -> tuple[str, ...]:
    """Return the names of this CPU's instructions that matter for passes, such as `"AVX-512 VNNI"`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    except OSError:  # not Linux
        import torch

        flags = {name for name, value in getattr(torch.cpu, "get_capabilities", dict)().items() if value}
    return tuple(name for name, known in _INSTRUCTIONS.items() if flags & set(known))


def instruction_set() -> str:
    """Return the instruction set of compiled passes: that of VARGEN_CPU, or the fastest that this CPU has.

    Raises:
        ValueError: for a set of VARGEN_CPU that is unknown, or that this CPU lacks.
    """
    known = [name for name, needed in SETS.items() if not needed or needed & set(cpu_instructions())]
    given = os.environ.get("VARGEN_CPU")
    if not given:
        return known[0]
    if given not in SETS:
        raise ValueError(f"VARGEN_CPU must be one of {', '.join(SETS)}, got {given!r}; {suggest_names(given, SETS)}")
    if given not in known:
        raise ValueError(f"VARGEN_CPU must be a set that this CPU has ({', '.join(known)}), got {given!r}")
    return given

"""What this CPU has that passes can use, and whether compiled ones (`vargen.kernels.int8.load`) can run on it."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

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
BYTE_PRODUCTS = ("AVX-512 VNNI", "AVX-VNNI", "AMX int8", "Arm dot product")


@lru_cache(maxsize=1)
def cpu_instructions() -> tuple[str, ...]:
    """Return the names of this CPU's instructions that matter for passes, such as `"AVX-512 VNNI"`."""
    import torch

    flags = {name for name, value in getattr(torch.cpu, "get_capabilities", dict)().items() if value}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags |= {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    except OSError:  # not Linux
        pass
    return tuple(name for name, known in _INSTRUCTIONS.items() if flags & set(known))


def find_compiled_blocker() -> str | None:
    """Return the reason why compiled passes cannot run here; None if they can, once they are built."""
    if os.environ.get("VARGEN_KERNELS") == "reference":
        return "VARGEN_KERNELS=reference"
    if "AVX-512 VNNI" not in cpu_instructions():
        return "compiled passes need AVX-512 VNNI, which this CPU does not have"
    if find_spec("numba") is None:
        return "Numba is not installed: pip install vargen[cpu]"
    return None

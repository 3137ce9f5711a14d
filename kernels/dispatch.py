"""Selection of the implementation, Triton kernels or torch, in one place for all kernels and networks.

By default, Triton kernels run on NVIDIA GPUs if Triton is installed, and torch runs elsewhere. VARGEN_KERNELS=reference selects
torch everywhere. VARGEN_KERNELS=triton requires the kernels, and raises an error where they cannot run. With TRITON_INTERPRET=1
they run on a CPU, for tests only. VARGEN_KERNELS=cpu requires the compiled int8 passes of `vargen.kernels.int8.cpu`.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger("vargen")

KERNELS_ENV = "VARGEN_KERNELS"
EAGER_CPU = True  # tests set it to False to take the paths of a GPU on a CPU
MAX_HEAD_DIM = 128  # maximum head width of attention kernels
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_VOCAB = 16384  # largest vocabulary whose row fits in the registers of a program
_CHOICES = ("auto", "reference", "triton", "cpu")


def is_eager_cpu(tensor: Tensor) -> bool:
    """Whether to use the paths for eager passes on a CPU: NumPy, other orders of operands, dynamic shapes."""
    return tensor.is_cpu and EAGER_CPU and not torch.compiler.is_compiling()


def is_eager_cpu_float32(x: Tensor) -> bool:
    """Whether a float32 pass can use the forms that are faster on a CPU in eager mode without gradients."""
    return x.dtype == torch.float32 and not torch.is_grad_enabled() and is_eager_cpu(x)


def read_kernel_setting() -> str:
    """Return the value of VARGEN_KERNELS: `"auto"`, `"reference"`, `"triton"` or `"cpu"`."""
    value = os.environ.get(KERNELS_ENV, "") or "auto"
    if value not in _CHOICES:
        raise ValueError(f"{KERNELS_ENV} must be one of {', '.join(_CHOICES)}, got {value!r}")
    return value


def explain_kernels(device: torch.device | str) -> tuple[str, str]:
    """Return which kernels run on a device, `"triton"` or `"reference"`, and the reason."""
    asked, kind = read_kernel_setting(), torch.device(device).type
    if asked in ("reference", "cpu"):
        return "reference", f"{KERNELS_ENV}={asked}"
    installed = _has_triton()
    if asked == "triton":
        if not installed:
            raise ValueError(f"{KERNELS_ENV}=triton needs Triton, which is not installed; pip install vargen[kernels]")
        if kind != "cuda" and not _is_interpreting():
            raise ValueError(f"{KERNELS_ENV}=triton needs an NVIDIA GPU, and this runs on {kind}; unset it")
        return "triton", f"{KERNELS_ENV}=triton"
    if kind != "cuda":
        return "reference", f"Triton kernels are for NVIDIA GPUs, and this runs on {kind}"
    if not installed:
        return "reference", "Triton is not installed: pip install vargen[kernels]"
    if torch.version.cuda is None:  # ROCm calls its devices cuda too
        return "reference", "the kernels are made for NVIDIA GPUs"
    if wrong := _run_self_check(str(device)):
        return "reference", f"a kernel failed its check here ({wrong})"
    return "triton", "Triton is installed, this is an NVIDIA GPU, and every kernel passed its check here"


def uses_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels are used for computations on this tensor."""
    if tensor.device.type == "cpu" and KERNELS_ENV not in os.environ:  # fast path, since this runs at every operation of a pass
        return False
    return _resolve_backend(tensor.device.type, os.environ.get(KERNELS_ENV, ""))


def supports_rows(rows: Tensor) -> bool:
    """Whether Triton kernels process rows `[..., V]` of probabilities or logits, which a program must hold in registers."""
    fits = rows.shape[-1] <= MAX_VOCAB and rows.dtype != torch.float64
    return uses_triton(rows) and fits and not torch.is_grad_enabled()


@lru_cache
def _resolve_backend(kind: str, asked: str) -> bool:
    name, reason = explain_kernels(kind)
    logger.debug("kernels on %s: %s (%s)", kind, name, reason)
    return name == "triton"


@lru_cache
def _run_self_check(device: str) -> str | None:
    from vargen.kernels.triton.launch import find_failure

    found = find_failure(device)
    if found:
        logger.warning("kernels on %s fail their check, so torch runs instead; please report this: %s", device, found)
    return found


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _is_interpreting() -> bool:
    from vargen.kernels.triton.launch import INTERPRETED

    return INTERPRETED

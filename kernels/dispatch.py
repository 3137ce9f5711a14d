"""Which path a pass takes: decided here, once, for all kernels and networks.

Triton kernels on a GPU where Triton is installed, torch elsewhere. VARGEN_KERNELS=reference takes torch everywhere; =triton
insists on the kernels, and is an error where they cannot run. With TRITON_INTERPRET=1 they can run on a CPU, for tests alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger("vargen")

VARIABLE = "VARGEN_KERNELS"
MAX_VOCAB = 16384  # of a row that a program holds in registers
_CHOICES = ("auto", "reference", "triton")


def is_eager_cpu(tensor: Tensor) -> bool:
    """Whether to take what is made for eager passes on a CPU: NumPy, other orders of operands, shapes that change."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def is_eager_cpu_float32(x: Tensor) -> bool:
    """Whether a pass in float32 may take the forms that are quicker on a CPU, operation by operation, without gradients."""
    return x.dtype == torch.float32 and not torch.is_grad_enabled() and is_eager_cpu(x)


def asked_for() -> str:
    """`"auto"`, `"reference"` or `"triton"`, as VARGEN_KERNELS says.

    Raises:
        ValueError: for anything else.
    """
    value = os.environ.get(VARIABLE, "") or "auto"
    if value not in _CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(_CHOICES)}, got {value!r}")
    return value


def explain(device: torch.device | str) -> tuple[str, str]:
    """Which kernels run on a device, `"triton"` or `"reference"`, and why.

    Raises:
        ValueError: if VARGEN_KERNELS is none of its values, or insists on kernels that cannot run there.
    """
    asked, kind = asked_for(), torch.device(device).type
    if asked == "reference":
        return "reference", f"{VARIABLE}=reference"
    installed = _installed()
    if asked == "triton":
        if not installed:
            raise ValueError(f"{VARIABLE}=triton needs Triton, which is not installed; pip install vargen[kernels]")
        if kind != "cuda" and not _interpreted():
            raise ValueError(f"{VARIABLE}=triton needs an NVIDIA GPU, and this runs on {kind}; unset it")
        return "triton", f"{VARIABLE}=triton"
    if kind != "cuda":
        return "reference", f"Triton kernels are for NVIDIA GPUs, and this runs on {kind}"
    if not installed:
        return "reference", "Triton is not installed: pip install vargen[kernels]"
    if torch.version.cuda is None:  # ROCm calls its devices cuda too
        return "reference", "the kernels are made for NVIDIA GPUs"
    if wrong := _trouble(str(device)):
        return "reference", f"a kernel failed its check here ({wrong})"
    return "triton", "Triton is installed, this is an NVIDIA GPU, and every kernel passed its check here"


def uses_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels take part in what is computed from this tensor.

    Raises:
        ValueError: see `explain`.
    """
    if tensor.device.type == "cpu" and VARIABLE not in os.environ:  # at every operation of a pass: nothing to look up
        return False
    return _chosen(tensor.device.type, os.environ.get(VARIABLE, ""))


def supports_rows(rows: Tensor) -> bool:
    """Whether Triton kernels take float32 rows `[..., V]` of probabilities or logits: those that a program can hold."""
    return uses_triton(rows) and rows.shape[-1] <= MAX_VOCAB and rows.dtype != torch.float64


@contextmanager
def force_reference() -> Iterator[None]:
    """Inside, torch runs whatever VARGEN_KERNELS says: for comparisons, in a process that does nothing else meanwhile."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@lru_cache
def _chosen(kind: str, asked: str) -> bool:
    name, reason = explain(kind)
    logger.debug("kernels on %s: %s (%s)", kind, name, reason)
    return name == "triton"


@lru_cache
def _trouble(device: str) -> str | None:
    from vargen.kernels.self_check import trouble

    found = trouble(device)
    if found:
        logger.warning("kernels on %s fail their check, so torch runs instead; please report this: %s", device, found)
    return found


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("triton") is not None


def _interpreted() -> bool:
    from vargen.kernels.launch import INTERPRETED

    return INTERPRETED

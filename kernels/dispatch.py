"""Selection of the implementation, Triton kernels or torch, for all kernels and networks; launches, and the self-check.

By default, Triton kernels run on NVIDIA GPUs if Triton is installed, and torch runs elsewhere. VARGEN_KERNELS=reference selects
torch everywhere. VARGEN_KERNELS=triton requires the kernels, and raises an error where they cannot run. With TRITON_INTERPRET=1
they run on a CPU, for tests only: in Triton's interpreter, which executes them in NumPy. VARGEN_KERNELS=cpu requires the
compiled int8 passes of `vargen.kernels.int8.load`.

Tests compare interpreted kernels with references. The effect of a new driver, Triton version or GPU shows only on the device.
So before the first pass on a device, each kernel runs once; if one fails, torch runs instead, and a warning is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("vargen")

KERNELS_ENV = "VARGEN_KERNELS"
EAGER_CPU = True  # tests set it to False to take the paths of a GPU on a CPU
MAX_HEAD_DIM = 128  # maximum head width of attention kernels
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_VOCAB = 16384  # largest vocabulary whose row fits in the registers of a program
_CHOICES = ("auto", "reference", "triton", "cpu")
# Read once, as Triton does at import: kernels are built for a GPU or for the interpreter.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


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
    installed = find_spec("triton") is not None
    if asked == "triton":
        if not installed:
            raise ValueError(f"{KERNELS_ENV}=triton needs Triton, which is not installed; pip install vargen[kernels]")
        if kind != "cuda" and not INTERPRETED:
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
    found = find_failure(device)
    if found:
        logger.warning("kernels on %s fail their check, so torch runs instead; please report this: %s", device, found)
    return found


# -- launches -----------------------------------------------------------------------------------------------------------------


def needs_upcast(dtype: torch.dtype) -> bool:
    """Whether a kernel must convert loaded values to float32: in bfloat16, the interpreter silently gives wrong results."""
    return INTERPRETED and dtype == torch.bfloat16


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel` on the device of its first argument."""
    first: Tensor = args[0]
    if not torch.compiler.is_compiling() and first.is_cuda and first.device.index != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


# -- self-check, on small cases with known results -----------------------------------------------------------------------------

_TOLERANCE = 2e-2  # for bfloat16 numbers near 1


def find_failure(device: torch.device | str) -> str | None:
    """Return the error of the first kernel that fails on the device, or None. The first run compiles, which takes seconds."""
    for name, check in CHECKS.items():
        try:
            wrong = check(torch.device(device))
        except Exception as error:  # any error of the compiler or the driver
            return f"{name}: {type(error).__name__}: {str(error)[:200]}"
        if wrong:
            return f"{name}: {wrong}"
    return None


def _check_attention(device: torch.device) -> str | None:
    """A tree of five tokens after a prefix, with rows of different lengths, in two parts, in float32 and bfloat16."""
    from vargen.kernels import ops
    from vargen.kernels.triton.attention import tree_attention

    generator = torch.Generator().manual_seed(0)
    sees = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()
    bias = torch.tensor([[0.5], [1.5]], dtype=torch.float32)
    dense = torch.full((2, 1, 5, 288), float("-inf"), dtype=torch.float64)
    for row, base in enumerate((4, 71)):
        dense[row, ..., :base] = 0.0
        dense[row, ..., base : base + 5].masked_fill_(sees, 0.0)
    dense[..., 0] = bias[..., None]
    mask = ops.KernelMask(torch.tensor([3, 70], device=device), bias.to(device), ops.pack_bits(sees).to(device))
    for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, _TOLERANCE)):  # float32 products may use TF32
        shapes = (2, 5, 2, 64), (2, 2, 288, 64), (2, 2, 288, 64)
        q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes)
        expected = ops.attend(q.double(), k.double(), v.double(), dense)
        found = tree_attention(q.to(device), k.to(device), v.to(device), mask)
        off = (found.cpu().double() - expected).abs().max()
        if not off <= limit:
            return f"{dtype} is off by {float(off):.2g}"
    return None


def _check_sampler(device: torch.device) -> str | None:
    from vargen.kernels.ops import filter_logits
    from vargen.kernels.triton.sampler import probs_from_logits, sample_gumbel_max

    logits = torch.randn(2, 3, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float32) * 3
    expected = filter_logits(logits.double() / 0.8, 50, 0.9, 0.01).softmax(-1)
    noise = torch.tensor([1, 2], device=device), torch.arange(3, device=device).expand(2, -1)
    options = (0.8, torch.float32), (50, torch.int64), (0.9, torch.float64), (0.01, torch.float64)
    given = (torch.full((2,), value, dtype=dtype, device=device) for value, dtype in options)
    temperature, top_k, top_p, min_p = given
    probs = probs_from_logits(logits.to(device), temperature, top_k, top_p, min_p, True)
    if not torch.equal(probs.cpu() > 0, expected > 0):
        return "other tokens are kept"
    off = (probs.cpu().double() - expected).abs().max()
    if not off <= 1e-5:
        return f"probabilities are off by {float(off):.2g}"
    tokens = sample_gumbel_max(probs, *noise)
    return None if (probs.gather(2, tokens[..., None]) > 0).all() else "a token without probability is sampled"


def _check_verification(device: torch.device) -> str | None:
    """Verdicts on probabilities of 0 and 1, which do not depend on noise."""
    from vargen.kernels.triton.sampler import sample_gumbel_max
    from vargen.kernels.triton.verification import verify_chain, verify_shared_noise, verify_traversal

    def given(values: list[Any]) -> Tensor:
        return torch.tensor(values, device=device)

    certain = torch.nn.functional.one_hot(given([[5, 6, 7], [5, 8, 9]]), 16).float()
    tokens = given([[5, 6], [5, 6]])
    noise = given([1, 2]), given([[0, 1, 2], [0, 1, 2]])
    chain = verify_chain(certain, tokens, certain.new_full((2, 2, 16), 1 / 16), None, *noise)
    if [each.tolist() for each in chain[:2]] != [[3, 2], [7, 8]]:
        return "a chain is verified wrongly"
    relaxed: Any = {"accept_prob": certain.new_ones(2, 2), "relaxation": certain.new_zeros(2)}
    found: Any = verify_chain(certain, tokens, None, None, *noise, **relaxed)
    if [each.tolist() for each in found] != [[3, 3], [7, 9], [0, 1]]:
        return "a chain is relaxed wrongly"
    if sample_gumbel_max(certain, *noise).tolist() != certain.argmax(-1).tolist():
        return "a token without probability is sampled"
    siblings = given([[5, 6], [4, 5]])  # two children of the root
    children = given([[1, 2], [0, 0], [0, 0]])
    matched = verify_shared_noise(certain.argmax(-1), siblings, children, 2)
    tree = children, given([-1, 0, 0]), given([0, 1, 1]), given([2, 0, 1])
    traversed = verify_traversal(certain, siblings, None, None, *tree, 2, *noise)
    for path, count, next_token in (matched, traversed):
        if [count.tolist(), path[:, 1].tolist(), next_token.tolist()] != [[2, 2], [1, 2], [6, 9]]:
            return "a tree is verified wrongly"
    return None


CHECKS: dict[str, Callable[[torch.device], str | None]] = {
    "tree attention": _check_attention,
    "sampler": _check_sampler,
    "verification": _check_verification,
}

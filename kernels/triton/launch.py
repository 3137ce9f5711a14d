"""Launching kernels, and the self-check that each passes on a device before its first use.

Kernels are compiled for a GPU, or run in Triton's interpreter, which executes them in NumPy for tests on a CPU.

Tests compare interpreted kernels with references. The effect of a new driver, Triton version or GPU shows only on the device.
So before the first pass on a device, each kernel runs once; if one fails, `vargen.kernels.dispatch` uses torch instead and logs
a warning.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Read once, as Triton does at import: kernels are built for one or the other.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


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
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(2, 5, 2, 64, generator=generator, dtype=torch.float32).to(dtype)
        k, v = (torch.randn(2, 2, 288, 64, generator=generator, dtype=torch.float32).to(dtype) for _ in range(2))
        expected = ops.attend(q.double(), k.double(), v.double(), dense)
        off = (tree_attention(q.to(device), k.to(device), v.to(device), mask).cpu().double() - expected).abs().max()
        if not off <= (_TOLERANCE if dtype == torch.bfloat16 else 1e-3):  # float32 products may use TF32
            return f"{dtype} is off by {float(off):.2g}"
    return None


_SAMPLER_OPTIONS = ((0.8, torch.float32), (50, torch.int64), (0.9, torch.float64))  # temperature, top-k, top-p


def _check_sampler(device: torch.device) -> str | None:
    from vargen.kernels.ops import filter_logits
    from vargen.kernels.triton.sampler import probs_from_logits, sample_gumbel_max

    logits = torch.randn(2, 3, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float32) * 3
    expected = filter_logits(logits.double() / 0.8, 50, 0.9).softmax(-1)
    noise = torch.tensor([1, 2], device=device), torch.arange(3, device=device).expand(2, -1)
    temperature, top_k, top_p = (torch.full((2,), value, dtype=dtype, device=device) for value, dtype in _SAMPLER_OPTIONS)
    probs = probs_from_logits(logits.to(device), temperature, top_k, top_p, True)
    if not torch.equal(probs.cpu() > 0, expected > 0):
        return "other tokens are kept"
    off = (probs.cpu().double() - expected).abs().max()
    if not off <= 1e-5:
        return f"probabilities are off by {float(off):.2g}"
    tokens = sample_gumbel_max(probs, *noise)
    return None if (probs.gather(2, tokens[..., None]) > 0).all() else "a token without probability is sampled"


def _check_kv_compaction(device: torch.device) -> str | None:
    from vargen.kernels.triton.kv import compact_kv

    kv = torch.arange(2 * 2 * 2 * 2 * 12 * 16, dtype=torch.float32).view(2, 2, 2, 2, 12, 16)
    expected, slots, count = kv.clone(), torch.tensor([[0, 2, 5], [0, 1, 0]]), [3, 2]
    expected[:, :, 0, :, 1:4] = kv[:, :, 0, :, [1, 3, 6]]  # the tokens of the other row are in place
    moved, length = kv.to(device, copy=True), torch.tensor([0, 3], device=device)
    arrivals = torch.zeros(2, dtype=torch.int32, device=device)
    given = slots.to(device), torch.tensor(count, device=device)
    compact_kv(moved, length, *given, arrivals, image_start=1, grid_tokens=11)
    if length.tolist() != [3, 5] or arrivals.any():
        return "pointers are wrong"
    return None if torch.equal(moved.cpu(), expected) else "other slots are moved"


def _check_verification(device: torch.device) -> str | None:
    """Verdicts on probabilities of 0 and 1, which do not depend on noise."""
    from vargen.kernels.triton.sampler import sample_gumbel_max
    from vargen.kernels.triton.verification import verify_chain, verify_shared_noise, verify_traversal

    certain = torch.nn.functional.one_hot(torch.tensor([[5, 6, 7], [5, 8, 9]]), 16).float().to(device)
    tokens = torch.tensor([[5, 6], [5, 6]], device=device)
    noise = torch.tensor([1, 2], device=device), torch.arange(3, device=device).expand(2, -1)
    chain = verify_chain(certain, tokens, torch.full((2, 2, 16), 1 / 16, dtype=torch.float32, device=device), None, *noise)
    if chain[0].tolist() != [3, 2] or chain[1].tolist() != [7, 8]:
        return "a chain is verified wrongly"
    accept_prob, spent = (
        torch.ones(2, 2, dtype=torch.float32, device=device),
        torch.zeros(2, dtype=torch.float32, device=device),
    )
    relaxed = verify_chain(certain, tokens, None, None, *noise, accept_prob=accept_prob, relaxation=spent)
    assert relaxed[2] is not None
    if relaxed[0].tolist() != [3, 3] or relaxed[1].tolist() != [7, 9] or relaxed[2].tolist() != [0, 1]:
        return "a chain is relaxed wrongly"
    if sample_gumbel_max(certain, *noise).tolist() != certain.argmax(-1).tolist():
        return "a token without probability is sampled"
    siblings = torch.tensor([[5, 6], [4, 5]], device=device)  # two children of the root
    children = torch.tensor([[1, 2], [0, 0], [0, 0]], device=device)
    matched = verify_shared_noise(certain.argmax(-1), siblings, children, 2)
    parents, depth, postorder = (torch.tensor(each, device=device) for each in ([-1, 0, 0], [0, 1, 1], [2, 0, 1]))
    traversed = verify_traversal(certain, siblings, None, None, children, parents, depth, postorder, 2, *noise)
    for path, count, next_token in (matched, traversed):
        if count.tolist() != [2, 2] or path[:, 1].tolist() != [1, 2] or next_token.tolist() != [6, 9]:
            return "a tree is verified wrongly"
    return None


CHECKS: dict[str, Callable[[torch.device], str | None]] = {
    "tree attention": _check_attention,
    "sampler": _check_sampler,
    "compaction of the KV cache": _check_kv_compaction,
    "verification": _check_verification,
}

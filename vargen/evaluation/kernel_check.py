"""Check of the Triton kernels on a device, over shapes and dtypes, against the plain references."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from vargen.kernels import reference, self_check

# Query heads, key heads and head width: equal and grouped heads, and a width that is not a power of two.
_HEADS = ((7, 7, 32), (4, 4, 64), (2, 2, 100), (4, 1, 128))
_TOKENS = (1, 5, 16, 64)
_CACHED = (3, 700)
_TOLERANCES = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # float32 products may use TF32
_VOCABULARIES = (4096, 8192, 16384)
_FILTERS: tuple[tuple[int | None, float], ...] = ((None, 1.0), (100, 1.0), (None, 0.9), (1000, 0.6))
_SANITIZER = "compute-sanitizer"


def compare_kernels(
    device: torch.device, dtypes: tuple[torch.dtype, ...] = tuple(_TOLERANCES)
) -> Iterator[tuple[str, str, str]]:
    """Yield (kernel, case, error) of every check; the error is empty for a right result.

    Args:
        dtypes: of the attention.
    """
    for name, check in self_check.CHECKS.items():
        yield name, "small cases", _attempt(check, device)
    for (heads, key_heads, width), tokens, cached, dtype in itertools.product(_HEADS, _TOKENS, _CACHED, dtypes):
        case = f"{heads}/{key_heads} heads of {width}, {tokens} tokens, {cached} cached, {str(dtype).removeprefix('torch.')}"
        yield "tree attention", case, _attempt(_compare_attention, device, dtype, heads, key_heads, width, tokens, cached)
    for vocabulary, (top_k, top_p) in itertools.product(_VOCABULARIES, _FILTERS):
        case = f"vocabulary {vocabulary}, top_k {top_k}, top_p {top_p}"
        yield "sampler", case, _attempt(_compare_sampler, device, vocabulary, top_k, top_p)


def _attempt(check: Callable[..., str | None], *args: Any) -> str:
    try:
        return check(*args) or ""
    except Exception as error:  # any error of the compiler or the driver
        return f"{type(error).__name__}: {str(error)[:300]}"


def _compare_attention(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, tokens: int, cached: int
) -> str:
    """Compare a binary tree in two rows of different lengths with attention in float64 under a dense mask."""
    from vargen.kernels.attention import pack_bits
    from vargen.kernels.tree_attention import tree_attention

    generator = torch.Generator().manual_seed(tokens + cached)
    parents = [-1, *((slot - 1) // 2 for slot in range(1, tokens))]
    ancestors = torch.zeros(tokens, tokens, dtype=torch.bool)
    for slot in range(tokens):
        ancestors[slot, sorted(reference.ancestors_of(parents, slot))] = True
    length, bias = torch.tensor([cached, cached // 2]), torch.tensor([[0.5], [1.5]])
    slots, padded = 1 + cached + tokens, -(-width // 16) * 16
    q = torch.randn(2, tokens, heads, width, generator=generator).to(dtype)
    k, v = (torch.randn(2, key_heads, slots, padded, generator=generator).to(dtype) for _ in range(2))
    keys, values = k[..., :width], v[..., :width]
    expected = _dense_attention(q, keys, values, length, bias, ancestors)
    on_device = (each.to(device) for each in (q, k, v, length, bias, pack_bits(ancestors)))
    q, k, v, *rest = on_device
    out = tree_attention(q, k[..., :width], v[..., :width], *rest)
    off = float((out.cpu().double() - expected).abs().max())
    return "" if off <= _TOLERANCES[dtype] else f"off by {off:.2g}"


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, length: Tensor, bias: Tensor, ancestors: Tensor) -> Tensor:
    """Attention `[R, T, H, K]` in float64 of a tree whose tokens are in the slots after a prefix of one and `length` others."""
    rows, tokens, heads, width = q.shape
    mask = torch.full((rows, tokens, k.shape[2]), -torch.inf, dtype=torch.float64)
    for row, count in enumerate(length.tolist()):
        mask[row, :, 0] = bias[row, 0]
        mask[row, :, 1 : 1 + count] = 0
        mask[row, :, 1 + count : 1 + count + tokens].masked_fill_(ancestors, 0)
    k, v = (each.double().repeat_interleave(heads // k.shape[1], 1) for each in (k, v))
    scores = q.double().transpose(1, 2) @ k.transpose(2, 3) * width**-0.5 + mask[:, None]
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _compare_sampler(device: torch.device, vocabulary: int, top_k: int | None, top_p: float) -> str:
    from vargen.kernels.sampler import sample_from_logits

    logits = 3 * torch.randn(1, 4, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    expected = reference.probabilities(logits[0], None, 1.0, 0.8, top_k, top_p)
    out = sample_from_logits(logits.to(device), temperature=0.8, top_k=top_k, top_p=top_p).probs
    assert out is not None
    off = float((out[0].cpu().double() - expected).abs().max())
    return "" if off <= 1e-5 else f"probabilities are off by {off:.2g}"


def run_sanitizer(seconds: float) -> str:
    """Run the small cases under NVIDIA's compute-sanitizer; returns an error, or an empty string for no error.

    Raises:
        FileNotFoundError: if compute-sanitizer is not installed.
    """
    tool = shutil.which(_SANITIZER)
    if tool is None:
        raise FileNotFoundError(f"{_SANITIZER} is not installed")
    code = "from vargen.kernels.self_check import find_failure; import sys; sys.exit(find_failure('cuda') or 0)"
    words = [tool, "--error-exitcode", "9", sys.executable, "-c", code]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"not finished in {seconds:.0f} s"
    return "" if done.returncode == 0 else "\n".join((done.stdout + done.stderr).splitlines()[-8:])

"""Operations of a pass by what is fastest on their device: Triton, torch or NumPy.

Logits become probabilities by temperature, top-k, top-p, min-p and softmax, in this order. Gumbel-max sampling needs one random
number for each token of the vocabulary. Where a sample need not be coupled with another one, one uniform for each row suffices:
the cumulative sum is inverted in two steps, and only the sums of blocks are accumulated over the whole row.

On a CPU, NumPy selects and sorts several times as fast as torch. Torch's flash attention kernel for CPUs is optimized for many
queries: without AVX-512, two matrix products and a softmax are faster for few (explicit attention). `docs/dev/log.md` has the
times.

A tree mask is stored as bits of 64-bit words: 2 KB for 128 tokens, compared with 541 KB for a mask over 4,096 slots.

Shape suffixes: B images or rows, T positions or queries, V vocabulary, H query heads, G key heads, S slots, K head width or
weights of a block, E + T tokens after the cache pointer, W words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.kernels.dispatch import (
    KERNEL_DTYPES,
    MAX_HEAD_DIM,
    is_eager_cpu,
    is_eager_cpu_float32,
    supports_rows,
    uses_triton,
)
from vargen.kernels.host import normal_tensors

MIN_TEMPERATURE = 1e-5  # used in place of 0 (greedy): dividing float32 logits by it leaves only the argmax, or ties
KEEP_ALL = 2.0  # top-p of an image without one: no sum exceeds it
MAX_QUERIES = 64
WORD = 64  # bits of an int64
_BLOCK = 64
_BELOW_ONE = 1 - 2.0**-50


def host_values(values: Tensor) -> list[Any] | None:
    """Return the values as a list on a CPU in eager mode, where a pass may skip what they show to be needless; else None."""
    return values.tolist() if is_eager_cpu(values) else None


# -- networks -----------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (Zhang & Sennrich 2019)."""
    if not is_eager_cpu_float32(x):
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps)  # they differ under autocast
    root, offset = _norm_constants(x.shape[-1], eps)  # x / sqrt(|x|^2 / D + eps) = x root / sqrt(|x|^2 + offset^2)
    length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), offset)
    return torch.div(x, length).mul_(weight * root)  # three times as fast as torch's


@cache
@normal_tensors()
def _norm_constants(width: int, eps: float) -> tuple[Tensor, Tensor]:
    root, offset = width**0.5, (width * eps) ** 0.5
    return torch.tensor(root, dtype=torch.float32), torch.tensor(offset, dtype=torch.float32)


# -- attention --------------------------------------------------------------------------------------------------------------


class KernelMask(NamedTuple):
    """Visible keys of the queries of a pass for the Triton kernel, of R rows with P prefix slots.

    Attributes:
        length: int64 or int32 `[R]`, number of committed image tokens of each row.
        prefix_bias: float32 `[R, P]`, added to the scores of the prefix slots, in natural units; -inf hides a slot.
        ancestor_bits: int64 `[T, W]` or `[B, T, W]`, where B divides R and row r uses tree r mod B. Bit j % 64 of word j // 64
            is set if token j of the `num_earlier + T` tokens after the pointer is the query or one of its ancestors. None: a
            chain.
        num_earlier: number of visible tokens after the pointer that earlier passes fed.
    """

    length: Tensor
    prefix_bias: Tensor
    ancestor_bits: Tensor | None = None
    num_earlier: int = 0


def prefers_explicit_attention() -> bool:
    """Whether explicit attention is faster for few queries: not if torch's kernel uses AVX-512."""
    return not torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def choose_cache_layout(length: Tensor, width: int, dtype: torch.dtype) -> tuple[bool, int, int]:
    """Choose how a cache with lengths on a device stores keys and values of heads of a width.

    Returns:
        Whether Triton kernels attend to it, a number that the slots of a row are a multiple of, and the
        width of a slot with its padding.
    """
    fused = width <= MAX_HEAD_DIM and dtype in KERNEL_DTYPES and uses_triton(length)
    multiple = 1 if is_eager_cpu(length) else 8  # on a GPU, torch would copy a mask of another length in each layer
    return fused, multiple, -(-width // 16) * 16 if fused else width  # from 100 to 112: slots start at multiples of 16 bytes


def fold_bias(bias: Tensor, heads: int, groups: int) -> Tensor:
    """Prepare the additive bias of a pass, `[B, 1, T, S]`, once for the attention of all layers.

    For few queries in float32 on a CPU without gradients, it becomes `[B G, T H / G, S]`, which selects explicit attention in
    `attend`. Otherwise it is returned unchanged, for torch's kernel.
    """
    B, _, T, S = bias.shape
    if not is_eager_cpu_float32(bias) or T > MAX_QUERIES or not prefers_explicit_attention():
        return bias
    return bias.expand(B, heads, T, S).reshape(B * groups, -1, S)


def attend(q_BTHK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, bias: Tensor | KernelMask) -> Tensor:
    """Attention `[B, T, H, K]`: by the Triton kernel for a `KernelMask`, explicit for a `fold_bias` bias, otherwise by torch.

    Explicit attention merges heads and rows into one batch dimension, which copies no keys and values as long as they are
    slices, along the slots, of contiguous tensors.
    """
    if isinstance(bias, KernelMask):
        from vargen.kernels.triton.attention import tree_attention

        return tree_attention(q_BTHK, k_BGSK, v_BGSK, bias)
    B, T, H, K = q_BTHK.shape
    G = k_BGSK.shape[1]
    q = q_BTHK.transpose(1, 2)
    if bias.dim() != 3:
        return F.scaled_dot_product_attention(q, k_BGSK, v_BGSK, attn_mask=bias, enable_gqa=G != H).transpose(1, 2)
    scores = torch.baddbmm(bias, q.reshape(B * G, -1, K), k_BGSK.flatten(0, 1).mT, alpha=K**-0.5)
    return torch.bmm(scores.softmax(-1), v_BGSK.flatten(0, 1)).view(B, H, T, K).transpose(1, 2)


def pack_bits(ancestors: Tensor) -> Tensor:
    """Pack bool `[..., T, E + T]` into int64 `[..., T, W]`: entry j is bit j % 64 of word j // 64. Bit 63 is the sign."""
    padded = F.pad(ancestors, (0, -ancestors.shape[-1] % WORD)).unflatten(-1, (-1, WORD)).to(torch.int64)
    return (padded << torch.arange(WORD, device=padded.device)).sum(-1)  # bits do not overlap, so the sum equals bitwise or


# -- logits to probabilities ------------------------------------------------------------------------------------------------


def probs_from_logits(logits: Tensor, temperature: float, top_k: int | None, top_p: float, min_p: float = 0.0) -> Tensor:
    """Probabilities, float32 `[..., V]`, from logits `[..., V]`; a temperature of 0 is greedy."""
    temperature = max(temperature, MIN_TEMPERATURE)
    if is_eager_cpu(logits) and not supports_rows(logits):
        return filter_logits(logits.float() / temperature, top_k, top_p, min_p).softmax(-1)
    V = logits.shape[-1]
    k, p = top_k or V, top_p if top_p < 1 else KEEP_ALL

    def option(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((1, 1, 1), value, dtype=dtype, device=logits.device)

    options = option(temperature, torch.float32), option(k, torch.int64), option(p, torch.float64)
    least = option(min_p, torch.float64) if min_p > 0 else None
    return probs_by_image(logits.reshape(1, -1, V), *options, least, k < V or p < 1 or min_p > 0).view(logits.shape)


def probs_by_image(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None, filters: bool
) -> Tensor:
    """Probabilities, float32 `[B, T, V]`, from logits `[B, T, V]` and options `[B, 1, 1]`, without waiting for a device.

    `min_p` is None if no image has that filter, and `filters` False if none has any.

    Sums of top-p run in float64 from the largest value down, so that they depend neither on `top_k` nor on rounding that
    differs from row to row.
    """
    if supports_rows(logits):
        from vargen.kernels.triton import sampler

        return sampler.probs_from_logits(logits, temperature, top_k, top_p, min_p, filters)
    if is_eager_cpu(logits):
        options = (temperature, top_k, top_p) if min_p is None else (temperature, top_k, top_p, min_p)
        return _probs_by_group(logits, *options)
    scaled = logits.float() / temperature
    if not filters:
        return scaled.softmax(-1)
    ordered = scaled.sort(dim=-1, descending=True).values
    last = (top_k.clamp(max=scaled.shape[-1]) - 1).expand(len(scaled), scaled.shape[1], 1)
    sums = (ordered - ordered[..., :1]).double().exp().cumsum(-1)
    before = (sums <= top_p * sums.gather(-1, last)).sum(-1, keepdim=True)
    least = ordered.gather(-1, torch.minimum(before, last))
    if min_p is not None:
        least = torch.maximum(least, ordered[..., :1] + min_p.log().float())
    return torch.where(scaled < least, float("-inf"), scaled).softmax(-1)


def _probs_by_group(logits: Tensor, *options: Tensor) -> Tensor:
    """The same on a CPU: images with equal options together, by the same operations as without the others."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, values in enumerate(zip(*(each.flatten().tolist() for each in options), strict=True)):
        groups.setdefault(values, []).append(row)
    if len(groups) == 1:
        return probs_from_logits(logits, *next(iter(groups)))
    probs = torch.empty_like(logits, dtype=torch.float32)
    for values, rows in groups.items():
        probs[rows] = probs_from_logits(logits[rows], *values)
    return probs


def filter_logits(logits: Tensor, top_k: int | None, top_p: float, min_p: float = 0.0) -> Tensor:
    """Set the logits `[..., V]` that the filters remove to -inf.

    top-k keeps all values that are at least the k-th largest. top-p then keeps the most probable tokens until their sum exceeds
    p, including the one that crosses it. min-p then keeps those that are at least `min_p` times as probable as the most
    probable one (Nguyen et al. 2024, arXiv 2407.01082). Ties are kept in all cases, so the result depends on values and not on
    the order of equal values in a sort.
    """
    if min_p > 0:
        kept_before = filter_logits(logits, top_k, top_p)
        least = logits.amax(-1, keepdim=True) + math.log(min_p)
        return torch.where(logits < least, float("-inf"), kept_before)
    kept = min(top_k or logits.shape[-1], logits.shape[-1])
    if top_p < 1.0:
        ordered = top_k_sorted(logits, kept)
        before = (ordered.softmax(-1).cumsum(-1) <= top_p).sum(-1, keepdim=True)
        least = ordered.gather(-1, before.clamp(max=kept - 1))
    elif kept < logits.shape[-1]:
        least = kth_largest_value(logits, kept)
    else:
        return logits
    return torch.where(logits < least, float("-inf"), logits)


def sum_rows(logits: Tensor) -> Tensor:
    """Sum each row of logits `[..., V]` in float32: finite where all of them are, unless the sum overflows."""
    return logits.sum(-1, dtype=torch.float32)


def are_finite(sums: Tensor) -> bool:
    """Return True if values `[B, T]` are finite, found out by a single operation for a few of them on a CPU. False: unknown."""
    few = 512
    readable = is_eager_cpu(sums) and sums.numel() <= few
    return readable and all(math.isfinite(each) for row in sums.tolist() for each in row)


# -- sampling ---------------------------------------------------------------------------------------------------------------


def sample_gumbel_max(probs: Tensor, seeds: Tensor, position: Tensor, exponential: Callable[[], Tensor]) -> Tensor:
    """Gumbel-max sampling: tokens int64 `[B, T]` from probabilities `[B, T, V]`, as argmax of p / E (the argmax of log p + G).

    Probabilities need not sum to 1. A token with probability 0 is never sampled. NaN yields an undefined index; check the
    logits.

    Args:
        seeds, position: int64 `[B]` and `[B, T]`, of the shared noise.
        exponential: returns this noise E, float32 `[B, T, V]`.
    """
    if supports_rows(probs):
        from vargen.kernels.triton import sampler

        return sampler.sample_gumbel_max(probs, seeds, position)
    ratio = probs / exponential()
    if is_eager_cpu(ratio):  # NumPy's argmax takes a tenth of the time of torch's
        return torch.from_numpy(ratio.detach().numpy().argmax(-1))
    return ratio.argmax(-1)


def sample_categorical(weights: Tensor, uniforms: Tensor) -> Tensor:
    """int64 `[...]`: i with probability weights_i / sum(weights).

    An index of weight 0 is never sampled. Rows that are all 0 or contain NaN give an arbitrary valid index.

    Args:
        weights: float32 `[..., V]`, nonnegative, not necessarily normalized.
        uniforms: float64 `[...]`, uniform on (0, 1).
    """
    V = weights.shape[-1]
    K = _BLOCK if V % _BLOCK == 0 and V > _BLOCK else V
    if is_eager_cpu(weights):
        return torch.from_numpy(_use_numpy(weights.detach().numpy(), uniforms.numpy(), K))
    blocks = weights.unflatten(-1, (V // K, K))
    upto = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = uniforms[..., None] * upto[..., -1:]
    block = torch.searchsorted(upto, target, right=True).clamp_(max=V // K - 1)
    before = torch.where(block > 0, upto.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, K))[..., 0, :].cumsum(-1, dtype=torch.float64)
    # The two sums may differ by rounding: clamp the rest to the block, and to an index of positive weight.
    rest = torch.minimum((target - before).clamp(min=0), inside[..., -1:] * _BELOW_ONE)
    return (block * K + torch.searchsorted(inside, rest, right=True).clamp_(max=K - 1))[..., 0]


def _use_numpy(weights: np.ndarray, uniforms: np.ndarray, K: int) -> np.ndarray:
    """The same in NumPy, whose small operations take a fifth of the time of torch's."""
    V = weights.shape[-1]
    blocks = weights.reshape(-1, V // K, K)
    row = np.arange(len(blocks))
    upto = blocks.sum(-1).cumsum(-1, dtype=np.float64)
    target = uniforms.reshape(-1) * upto[:, -1]
    block = np.minimum((upto <= target[:, None]).sum(-1), V // K - 1)
    before = np.where(block > 0, upto[row, block - 1], 0.0)
    inside = blocks[row, block].cumsum(-1, dtype=np.float64)
    rest = np.minimum(np.maximum(target - before, 0.0), inside[:, -1] * _BELOW_ONE)
    slot = np.minimum((inside <= rest[:, None]).sum(-1), K - 1)
    return (block * K + slot).reshape(weights.shape[:-1])


# -- verification by kernels, as the fields of `Verdict` in order; None where torch does it ------------------------------------


def _verification_kernels(rows: Tensor) -> Any:
    """The module of the kernels, if they verify drafts of such rows."""
    if not supports_rows(rows):
        return None
    from vargen.kernels.triton import verification

    return verification


def verify_chain(
    probs: Tensor, draft: Any, noise: Any, accept_prob: Callable[[], Tensor] | None = None, **limits: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Verify a chain, exactly or by the acceptance probabilities of a relaxed rule, `[B, T - 1]`.

    Args:
        probs, draft, noise: as an `AcceptanceRule` takes them.
        accept_prob: computes them, where a kernel verifies.
        limits: `relaxation`, `budget` and `tightening`; see `vargen.kernels.triton.verification.verify_chain`.
    """
    if (kernels := _verification_kernels(probs)) is None:
        return None
    relaxed = limits if accept_prob is None else {"accept_prob": accept_prob(), **limits}
    found = kernels.verify_chain(probs, draft.tokens, draft.probs, draft.valid, *noise.key, **relaxed)
    return torch.arange(probs.shape[1], device=probs.device).expand(len(probs), -1), *found


def verify_shared_noise(sampled: Tensor, draft: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Verify a tree or chain, given the tokens int64 `[B, T]` that the shared noise selects after each node."""
    if (kernels := _verification_kernels(sampled)) is None:
        return None
    return kernels.verify_shared_noise(sampled, draft.tokens, draft.tree.children, draft.tree.max_path)


def verify_traversal(probs: Tensor, draft: Any, noise: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Verify a tree or chain by `vargen.decoding.tree_rules.traversal`, which has the same arguments."""
    if (kernels := _verification_kernels(probs)) is None:
        return None
    tree = draft.tree
    tables = tree.children, tree.parents, tree.depth, tree.postorder, tree.max_path
    return kernels.verify_traversal(probs, draft.tokens, draft.probs, draft.valid, *tables, *noise.key)


# -- order statistics ---------------------------------------------------------------------------------------------------------


def kth_largest_value(values: Tensor, k: int) -> Tensor:
    """Return the k-th largest value (k = 1 is the largest) of each row of `values [..., V]`, as `[..., 1]`; 1 <= k <= V.

    Both torch and NumPy sort NaN as the largest value, so rows with NaN have no meaningful threshold.
    """
    if values.dtype in (torch.float32, torch.float64) and is_eager_cpu(values):
        V = values.shape[-1]
        ordered = np.partition(values.detach().numpy(), V - k, axis=-1)
        return torch.from_numpy(ordered[..., V - k : V - k + 1])
    return values.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def top_k_sorted(values: Tensor, k: int) -> Tensor:
    """Return the k largest values of each row of `values [..., V]` in descending order, `[..., k]`; 1 <= k <= V."""
    if values.dtype in (torch.float32, torch.float64) and is_eager_cpu(values):
        array, V = values.detach().numpy(), values.shape[-1]
        kept = array if k == V else np.partition(array, V - k, axis=-1)[..., V - k :]
        return torch.from_numpy(-np.sort(-kept, axis=-1))
    return values.sort(dim=-1, descending=True).values[..., :k]

"""Attention of a decoding pass: dispatch, the explicit form for few queries on a CPU, and tree masks as bits.

Torch's flash attention kernel for CPUs is optimized for many queries. With torch 2.13 on two Zen 3 cores and 128 slots in use,
it takes, in microseconds per layer including copies, 74, 110 and 118 for 1, 4 and 16 queries in 2 rows of 7 heads of width 32,
compared with 43, 85 and 102 for explicit attention (two matrix products and a softmax). For 1 row of 12 heads of width 64, it
takes 108, 181 and 178, compared with 88, 148 and 156.
On a Xeon with AVX-512, torch's kernel is faster: for 1, 4, 8 and 16 queries in 2 rows of 7 heads with 135 slots it takes 23,
35, 49 and 86, compared with 26, 39, 54 and 87.

A tree mask is stored as bits of 64-bit words: 2 KB for 128 tokens, compared with 541 KB for a mask over 4,096 slots.

Shape suffixes: B rows, T queries, H query heads, G key heads, S slots, K head width, E + T tokens after the cache pointer, W
words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.kernels.dispatch import is_eager_cpu_float32

MAX_QUERIES = 64
WORD = 64  # bits of an int64


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
    """Whether explicit attention is faster for few queries: not if torch's kernel uses AVX-512 (see above)."""
    return not torch.backends.cpu.get_cpu_capability().startswith("AVX512")


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
    """Attention `[B, T, H, K]`: explicit for a `fold_bias` bias, otherwise by torch or the Triton kernel.

    A `KernelMask` selects the kernel; any other bias or mask selects torch's function.

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
    padded = torch.nn.functional.pad(ancestors, (0, -ancestors.shape[-1] % WORD)).unflatten(-1, (-1, WORD)).to(torch.int64)
    return (padded << torch.arange(WORD, device=padded.device)).sum(-1)  # bits do not overlap, so the sum equals bitwise or


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """Unpack int64 `[..., T, W]` into bool `[..., T, count]`: the inverse of `pack_bits`."""
    return ((words[..., None] >> torch.arange(WORD, device=words.device)) & 1).bool().flatten(-2)[..., :count]

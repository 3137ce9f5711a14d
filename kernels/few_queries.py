"""Attention of the few queries of a decoding pass.

The flash kernel that torch has for CPUs is made for many queries. Torch 2.13 on two Zen 3 cores, microseconds per layer with
its copies, 128 slots in use: for 2 rows of 7 heads of width 32 and 1, 4 and 16 queries it takes 74, 110 and 118, written out
43, 85 and 102; for 1 row of 12 heads of width 64 it takes 108, 181 and 178, written out 88, 148 and 156.
On a Xeon with AVX-512 it is the other way round: for 2 rows of 7 heads, 135 slots and 1, 4, 8 and 16 queries 23, 35, 49 and 86
against 26, 39, 54 and 87.

Shape suffixes: B rows, T queries, H query heads, G key heads, S slots, K head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.kernels.dispatch import is_eager_cpu_float32

MAX_QUERIES = 64


class Seen(NamedTuple):
    """What the queries of a pass see, for the kernel of `tree_attention`, whose arguments of these names they are."""

    length: Tensor
    prefix_bias: Tensor
    words: Tensor | None
    earlier: int


def prefers_explicit_attention() -> bool:
    """Whether attention of few queries is quicker written out: not where torch's own kernel has AVX-512 (see above)."""
    return not torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def folded(bias: Tensor, heads: int, groups: int) -> Tensor:
    """The additive bias of a pass `[B, 1, T, S]`, made ready once for the attention of all its layers.

    In float32 on a CPU, for few queries and without gradients: `[B G, T H / G, S]`, by which `attention` knows to write it out.
    Else as it is, for torch's own.
    """
    B, _, T, S = bias.shape
    if not is_eager_cpu_float32(bias) or T > MAX_QUERIES or not prefers_explicit_attention():
        return bias
    return bias.expand(B, heads, T, S).reshape(B * groups, -1, S)


def attention(q_BTHK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, bias: Tensor | Seen) -> Tensor:
    """Attention `[B, T, H, K]` under a `folded` bias, written out; or under what torch's own takes, a bias or a mask, by that;
    or by a kernel, which takes what is `Seen`.

    Written out, heads are one batch with the rows, which takes no copy of keys and values that are contiguous but for their
    number of slots.
    """
    if isinstance(bias, Seen):
        from vargen.kernels.tree_attention import tree_attention

        return tree_attention(q_BTHK, k_BGSK, v_BGSK, bias.length, bias.prefix_bias, bias.words, earlier=bias.earlier)
    B, T, H, K = q_BTHK.shape
    G = k_BGSK.shape[1]
    q = q_BTHK.transpose(1, 2)
    if bias.dim() != 3:
        return F.scaled_dot_product_attention(q, k_BGSK, v_BGSK, attn_mask=bias, enable_gqa=G != H).transpose(1, 2)
    scores = torch.baddbmm(bias, q.reshape(B * G, -1, K), k_BGSK.flatten(0, 1).mT, alpha=K**-0.5)
    return torch.bmm(scores.softmax(-1), v_BGSK.flatten(0, 1)).view(B, H, T, K).transpose(1, 2)

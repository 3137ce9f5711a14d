"""Attention of the few queries of a decoding pass.

The flash kernel that torch has for CPUs is made for many queries. Torch 2.13 on two Zen 3 cores, microseconds per layer with
its copies, 128 slots in use: for 2 rows of 7 heads of width 32 and 1, 4 and 16 queries it takes 74, 110 and 118, written out
43, 85 and 102; for 1 row of 12 heads of width 64 it takes 108, 181 and 178, written out 88, 148 and 156.

Shape suffixes: B rows, T queries, H query heads, G key heads, S slots, K head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.kernels.dispatch import float32_on_cpu

MOST_QUERIES = 64


def attention(q_BTHK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, bias: Tensor) -> Tensor:
    """Attention `[B, T, H, K]` under a bias (or a boolean mask) that broadcasts to `[B, H, T, S]`.

    Other devices and dtypes, many queries, a mask, and anything that records gradients go to torch's own. Here heads are one
    batch with the rows, which takes no copy of keys and values that are contiguous but for their number of slots.
    """
    B, T, H, K = q_BTHK.shape
    G, S = k_BGSK.shape[1:3]
    q = q_BTHK.transpose(1, 2)
    if not float32_on_cpu(q) or bias.dtype == torch.bool or T > MOST_QUERIES:
        return F.scaled_dot_product_attention(q, k_BGSK, v_BGSK, attn_mask=bias, enable_gqa=G != H).transpose(1, 2)
    q = q.reshape(B * G, -1, K)
    bias = bias.expand(B, H, T, S).reshape(B * G, -1, S)
    weights = torch.baddbmm(bias, q, k_BGSK.flatten(0, 1).mT, alpha=K**-0.5).softmax(-1)
    return torch.bmm(weights, v_BGSK.flatten(0, 1)).view(B, H, T, K).transpose(1, 2)

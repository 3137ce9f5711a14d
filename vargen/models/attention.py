"""Attention where gradients may be needed; `vargen.kernels.ops.attend` is that of passes over a cache without them.

Shape suffixes: B rows, T queries, S keys, H query heads, G key heads, K head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, bias: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention `[B, H, T, K]` with an additive bias, a bool mask or neither. Default scale: K^-0.5.

    On a CPU, the gradient of torch's fused attention takes a third of a training step and more, that of these products a
    tenth, and they can be compiled. They are used where their softmax is in float32.
    """
    H, G = q_BHTK.shape[1], k_BGSK.shape[1]
    exact = q_BHTK.dtype == torch.float32 or torch.is_autocast_enabled("cpu")
    if q_BHTK.device.type != "cpu" or not torch.is_grad_enabled() or not exact:
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, attn_mask=bias, scale=scale, enable_gqa=G != H)
    if G != H:
        k_BGSK, v_BGSK = (each.repeat_interleave(H // G, 1) for each in (k_BGSK, v_BGSK))
    scores = (q_BHTK * (q_BHTK.shape[-1] ** -0.5 if scale is None else scale)) @ k_BGSK.mT
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    return scores.softmax(-1).type_as(v_BGSK) @ v_BGSK

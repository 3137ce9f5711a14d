"""Linear layers for the few rows of a decoding pass on a CPU.

BLAS picks its path by shape, and the same products in another order run up to 3 times faster. Torch 2.13 on two Zen 3 cores,
milliseconds for 16 layers of 2304 x 768 in float32, of which one read takes 3.3:

    rows                 1      2      4      8     16     24     32     64
    x W^T              7.0   13.7   15.9   20.2   20.2      -   27.5   43.4
    W x^T              6.8    5.0    5.1    9.7   11.3   16.2   17.9   27.1
    halves of W        4.4    5.1    5.0    9.5   11.2   15.9   17.4   26.4
    16 rows of W each  4.4    5.5    6.2    7.3    9.9   14.2   18.0   32.7

One row goes by halves because BLAS runs a product of a matrix and a vector on one thread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 64
_BLOCK = 16


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x [..., K]` times `weight [N, K]` transposed: `[..., N]`, contiguous. Equal to `F.linear` up to float32 rounding.

    Other devices and dtypes, many rows, and anything that records gradients go through `F.linear` itself.
    """
    N, K = weight.shape
    rows = x.numel() // K
    if x.device.type != "cpu" or x.dtype != torch.float32 or rows > MOST_ROWS or rows == 0 or torch.is_grad_enabled():
        return F.linear(x, weight)
    shape = (*x.shape[:-1], N)
    flat = x.reshape(rows, K).contiguous()  # the products are slow again for a next layer that is fed a transposed view
    if rows == 1 and N % 2 == 0:
        return torch.bmm(weight.unflatten(0, (2, -1)), flat.t().expand(2, K, 1)).view(shape)
    if 4 < rows < 32 and N % _BLOCK == 0:
        blocks = weight.unflatten(0, (-1, _BLOCK))
        return torch.bmm(flat.expand(len(blocks), rows, K), blocks.mT).transpose(0, 1).reshape(shape)
    return (weight @ flat.t()).t().contiguous().view(shape)

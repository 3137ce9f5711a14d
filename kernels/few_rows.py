"""Linear layers for the few rows of a decoding pass on a CPU: their weights transposed in memory.

A layer `x W^T` of few rows reads its whole weight and does little with it, and BLAS reads it faster as `[K, N]` than as the
`[N, K]` in which torch makes and loads it. Torch 2.13, one thread of a Xeon with AVX-512, milliseconds for all layers of the
packaged model, 6.3 million weights in float32:

    rows          1     2     4     8    16    32    64
    [N, K]     1.00  1.01  1.32  1.74  2.50  3.78  6.14
    [K, N]     0.98  1.11  1.10  1.18  1.75  2.77  4.90
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

_laying_out = threading.Lock()  # of two calls that begin at once, one waits for the other's layout


def transpose_linear_weights(network: nn.Module, transposed: bool = True) -> None:
    """Lay out the weights of all linear layers in a CPU's memory as `[K, N]`, or with `transposed=False` as `[N, K]` again.

    Shapes and values stay, and so does what is computed, up to the order of its sums. Weights that already lie so are not
    touched, nor are those of other devices transposed.
    """
    with _laying_out:
        for layer in network.modules():
            if isinstance(layer, nn.Linear):
                weight = layer.weight
                # In the mode in which it was made: a weight for training stays one.
                with torch.inference_mode(weight.is_inference()), torch.no_grad():
                    if not transposed and not weight.is_contiguous():
                        weight.data = weight.data.contiguous()
                    elif transposed and weight.device.type == "cpu" and not weight.t().is_contiguous():
                        weight.data = weight.data.t().contiguous().t()


_Module: Any = nn.Module  # Any: for checkers, attributes of a network are what its own class says


class TransposableWeights(_Module):
    """A base of networks that call `transpose_linear_weights`: off the CPU, in training and in `state_dict`, weights are `[N,
    K]`.

    safetensors writes contiguous tensors alone, and other users of a state dict expect them, too. They are copies where the
    weights lie transposed: passes of other threads may read the weights meanwhile.
    """

    def _apply(self, fn: Any, *args: Any, **options: Any) -> Any:
        super()._apply(fn, *args, **options)
        if any(weight.device.type != "cpu" for weight in self.parameters()):
            transpose_linear_weights(self, False)
        return self

    def train(self, mode: bool = True) -> Any:
        if mode:
            transpose_linear_weights(self, False)
        return super().train(mode)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """As torch has it, of contiguous tensors, unless `keep_vars` asks for the parameters themselves."""
        found = super().state_dict(*args, **options)
        if not options.get("keep_vars"):
            for name, value in found.items():
                if isinstance(value, torch.Tensor) and not value.is_contiguous():
                    found[name] = value.contiguous()
        return found

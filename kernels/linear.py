"""Transposed weights of linear layers, for the few rows of a decoding pass on a CPU.

A layer `x W^T` with few rows is bound by reading its weight, which BLAS reads faster as `[K, N]` than as `[N, K]`, the layout
in which torch creates and loads it. With torch 2.13 on one thread of a Xeon with AVX-512, milliseconds for all layers of the
packaged model, with 6.3 million float32 weights:

    rows          1     2     4     8    16    32    64
    [N, K]     1.00  1.01  1.32  1.74  2.50  3.78  6.14
    [K, N]     0.98  1.11  1.10  1.18  1.75  2.77  4.90
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

_laying_out = threading.Lock()  # concurrent calls must not change the layout at the same time


def transpose_linear_weights(network: nn.Module, transposed: bool = True) -> None:
    """Store the weights of all linear layers on a CPU as `[K, N]` in memory, or as `[N, K]` again with `transposed=False`.

    Shapes and values do not change, and results change only by the order of summation. Weights that already have the layout are
    not touched, and weights on other devices are not transposed.
    """
    with _laying_out:
        for layer in network.modules():
            if isinstance(layer, nn.Linear) and type(layer.weight) is nn.Parameter:  # others have layouts of their own
                weight = layer.weight
                # In the inference mode of the weight, so that a trainable weight remains trainable.
                with torch.inference_mode(weight.is_inference()), torch.no_grad():
                    if not transposed and not weight.is_contiguous():
                        weight.data = weight.data.contiguous()
                    elif transposed and weight.device.type == "cpu" and not weight.t().is_contiguous():
                        weight.data = weight.data.t().contiguous().t()


_Module: Any = nn.Module  # Any, so that type checkers use the attribute types of the subclass


class TransposableWeights(_Module):
    """Base class of networks that call `transpose_linear_weights`.

    On other devices, in training and in `state_dict`, weights have the layout `[N, K]`. safetensors writes only contiguous
    tensors, and other users of a state dict expect them, too. For transposed weights these are copies, because other threads
    may be reading the weights.
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
        """As in torch, but with contiguous tensors, unless `keep_vars` requests the parameters themselves."""
        found = super().state_dict(*args, **options)
        if not options.get("keep_vars"):
            for name, value in found.items():
                if isinstance(value, torch.Tensor) and not value.is_contiguous():
                    found[name] = value.contiguous()
        return found

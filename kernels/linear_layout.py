"""How linear layers lie in the memory of a CPU.

A layer `x W^T` with few rows is bound by reading its weight, which BLAS reads faster as `[K, N]` than as `[N, K]`, the layout
in which torch creates and loads it: K inputs, N outputs. `docs/dev/log.md` has the times.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from vargen.kernels.dispatch import is_eager_cpu

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

    On other devices, in training and in `state_dict`, weights have the layout `[N, K]`: safetensors writes only contiguous
    tensors. In a state dict, transposed weights are copied, because other threads may be reading them.
    """

    def choose_layout(self, like: Tensor) -> None:
        """Transpose the weights if that is faster in a pass over this tensor: eager on a CPU, and not one of training."""
        if is_eager_cpu(like) and not (self.training and torch.is_grad_enabled()):
            transpose_linear_weights(self)

    def _apply(self, fn: Any, *args: Any, **options: Any) -> Any:
        super()._apply(fn, *args, **options)
        if any(weight.device.type != "cpu" for weight in self.parameters()):
            transpose_linear_weights(self, False)
        return self

    def train(self, mode: bool = True) -> Any:
        """As in torch; weights in training have the layout `[N, K]`."""
        if mode:
            transpose_linear_weights(self, False)
        return super().train(mode)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """As in torch, but contiguous, unless `keep_vars` requests the parameters themselves."""
        found = super().state_dict(*args, **options)
        if not options.get("keep_vars"):
            for name, value in found.items():
                if isinstance(value, Tensor) and not value.is_contiguous():
                    found[name] = value.contiguous()
        return found

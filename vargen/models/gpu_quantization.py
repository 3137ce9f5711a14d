"""8-bit products of transformers on a GPU, by torchao: weights and inputs in int8 or float8.

Each output channel of a weight and each row of an input has its own scale, so that a row does not depend on the rows beside it.
Other steps keep the dtype of the network. Unlike `vargen.kernels.int8` on a CPU, a pass over several tokens may round
differently from passes over one.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from vargen.values import short_repr

_FLOAT8_CAPABILITY = (8, 9)  # the first NVIDIA GPUs that multiply float8 matrices
GPU_FORMATS = ("int8", "float8")


def validate_gpu_quantization(quantization: str, device: torch.device) -> None:
    """Check that a format can be used on a GPU.

    Raises:
        ValueError: for an unknown format, or float8 on a GPU without float8 products.
        ImportError: if torchao is not installed.
    """
    if quantization not in GPU_FORMATS:
        allowed = ", ".join(map(repr, GPU_FORMATS))
        raise ValueError(f"quantization must be {allowed}, or None on a GPU, got {short_repr(quantization)}")
    if find_spec("torchao") is None:
        raise ImportError(f"quantization={quantization!r} on a GPU needs torchao: pip install torchao")
    if quantization == "float8":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        if capability < _FLOAT8_CAPABILITY:
            raise ValueError(
                "quantization='float8' needs an NVIDIA GPU of compute capability 8.9 or higher, got "
                f"{'.'.join(map(str, capability)) if device.type == 'cuda' else device}; 'int8' runs on older ones"
            )


def quantize_for_gpu(network: Any, layers: set[str], quantization: str) -> None:
    """Replace the weights of some linear layers by those of torchao, in place, for inference.

    Args:
        network: a transformer in floating point, on its device. Its `gpu_quantization` becomes the format.
        layers: names of the layers.
        quantization: one of `GPU_FORMATS`.

    Raises:
        ValueError, ImportError: see `validate_gpu_quantization`.
    """
    validate_gpu_quantization(quantization, network.device)
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        PerRow,
        quantize_,
    )

    if quantization == "float8":
        config: Any = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    else:
        config = Int8DynamicActivationInt8WeightConfig(granularity=PerRow())

    def selected(module: nn.Module, name: str) -> bool:
        return name in layers

    with torch.no_grad():
        quantize_(network.eval().requires_grad_(False), config, filter_fn=selected)
    network.gpu_quantization = quantization

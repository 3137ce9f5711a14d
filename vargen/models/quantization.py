"""Networks with 8-bit weights: linear layers with 8-bit integer products on a CPU, and torchao's formats on NVIDIA GPUs.

The weights of an `Int8Linear` have a scale per output channel, and each row of its input gets its own scale. See
`vargen.kernels.int8.arithmetic` for the arithmetic, which returns the same bits for a row whatever is beside it.

On a GPU, inputs and sums keep the dtype of the network: at small batches, a pass is bound by reading its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vargen.kernels.int8.arithmetic import int8_linear, quantize_activations, quantize_weight_rows, regroup_weight_rows
from vargen.kernels.int8.format import Layers, Matrix, join_layers, pack_matrix
from vargen.kernels.int8.load import warn_if_slow
from vargen.values import short_repr

SCALE_SUFFIX = "weight_scale"  # of the name of a layer's scales in weight files
GPU_FORMATS = {"int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}  # of torchao
_FLOAT8_CAPABILITY = (8, 9)  # NVIDIA's Ada generation


def validate_quantization(quantization: Any, device: torch.device | None = None) -> None:
    """Raise ValueError for an unknown format, or a device, by default the CPU, that does not have it."""
    if quantization is None:
        return
    if quantization not in tuple(GPU_FORMATS):
        raise ValueError(f"quantization must be 'int8', 'float8' or None, got {short_repr(quantization)}")
    kind = "cpu" if device is None else device.type
    if kind not in ("cpu", "meta", "cuda") or (kind != "cuda" and quantization != "int8"):
        runs = "CPUs and NVIDIA GPUs" if quantization == "int8" else "NVIDIA GPUs, with device='cuda'"
        raise ValueError(f"quantization={quantization!r} runs on {runs}, got device {str(device or kind)!r}")
    if kind == "cuda" and find_spec("torchao") is None:
        raise ValueError(f"quantization={quantization!r} on a GPU needs torchao: pip install vargen[quantization]")
    if kind == "cuda" and quantization == "float8" and torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY:
        raise ValueError("quantization='float8' needs an NVIDIA GPU of compute capability 8.9 or later; use 'int8'")


def quantize_weights_on_gpu(network: Any, quantization: str) -> None:
    """Store the weights of a network's linear layers in 8 bits by torchao, in place, and have its blocks compiled if it can.

    Compiled blocks dequantize weights within their products; without, each weight is written out in each pass.
    """
    import torchao.quantization

    layers = linear_layers(network)
    config = getattr(torchao.quantization, GPU_FORMATS[quantization])()
    torchao.quantization.quantize_(network, config, filter_fn=lambda layer, name: name in layers)
    if network._repeated_blocks:
        network.compile_repeated_blocks(fullgraph=True)
    network.gpu_format = quantization


class Int8Linear(nn.Module):
    """A linear layer with int8 weights `[N, K]` and float32 scales `[N]` of its output channels, for inference only."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(out_features), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None

    def requires_grad_(self, requires_grad: bool = True) -> Int8Linear:
        """Leave the parameters without gradients: integers have none."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 `[..., N]` for float32 `[..., K]`."""
        return self.multiply(*quantize_activations(x))

    def multiply(self, values: Tensor, scale: Tensor) -> Tensor:
        """Return float32 `[..., N]` for quantized rows: int8 `[..., K]` and float32 scales `[..., 1]`."""
        out = int8_linear(values, scale, self.weight, self.weight_scale)
        return out if self.bias is None else out.add_(self.bias)

    def rows(self, first: int) -> Int8Linear:
        """Return the layer without its first output channels; it shares the weights."""
        part = Int8Linear.__new__(Int8Linear)
        nn.Module.__init__(part)
        part.in_features, part.out_features = self.in_features, self.out_features - first
        part.weight = nn.Parameter(self.weight[first:], requires_grad=False)
        part.weight_scale = nn.Parameter(self.weight_scale[first:], requires_grad=False)
        part.bias = None if self.bias is None else nn.Parameter(self.bias[first:], requires_grad=False)
        return part


def linear_layers(network: Any) -> dict[str, nn.Linear]:
    """Return the layers that quantization replaces, by name: linear ones whose names contain none of `float_layers`."""
    found = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    return {name: layer for name, layer in found.items() if not any(part in name for part in network.float_layers)}


def replace_linear_layers(network: Any) -> None:
    """Replace the `linear_layers` of a network by `Int8Linear` ones of the same shape, without weights."""
    for name, layer in linear_layers(network).items():
        parent, _, own = name.rpartition(".")
        setattr(network.get_submodule(parent), own, Int8Linear(layer.in_features, layer.out_features, layer.bias is not None))


def quantized_layers(network: nn.Module) -> dict[str, Int8Linear]:
    """Return the quantized layers of a network by name."""
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, Int8Linear)}


def quantize_weights(
    layers: Mapping[str, Any], weights: Mapping[str, Tensor], stored: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Return the state of a network with these quantized layers from the weights of the network before.

    Weights that are `stored` as int8 `[N, K]` with scales `[N, groups]` become int8 directly.
    """
    found: dict[str, Tensor] = dict(weights)
    for layer in layers:
        name = f"{layer}.weight"
        if f"{layer}.{SCALE_SUFFIX}" in weights:  # quantized already
            continue
        if name in stored:
            values, scale = regroup_weight_rows(*stored[name])
        else:
            if not torch.isfinite(weights[name]).all():
                raise ValueError(f"{name} holds values that are not finite, so it cannot be quantized")
            values, scale = quantize_weight_rows(weights[name])
        found[name], found[f"{layer}.{SCALE_SUFFIX}"] = values.contiguous(), scale.contiguous()
    return found


def start_compiling(network: Any) -> None:
    """Start to build the compiled code of a network's passes, if it is not there; warn where they would be slow without."""
    warn_if_slow()
    if network.compiled_code is not None:
        network.compiled_code.load(wait=False)


def validate_placement(network: nn.Module) -> None:
    """Raise ValueError unless a quantized network is in float32 and on a CPU (or on the meta device)."""
    for name, parameter in network.named_parameters():
        if parameter.device.type not in ("cpu", "meta") or parameter.dtype not in (torch.int8, torch.float32):
            given = f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
            raise ValueError(
                f"a network with quantization='int8' computes in float32 on a CPU, got {given} ({name}); for another dtype or "
                "a GPU, open the model with this dtype or device"
            )


def quantize_network(network: Any, quantization: str = "int8") -> Any:
    """Quantize the linear layers of a network with a `quantization` setting on a CPU, in place, for inference; returns it.

    Its other weights become float32, and saving it stores the quantized ones.
    """
    validate_quantization(quantization, network.device)
    if "quantization" not in network.config:
        raise ValueError(f"quantization={quantization!r} is not supported by {type(network).__name__}")
    if network.config.quantization == quantization:
        return network
    start_compiling(network)
    weights = {name: value.float() if value.is_floating_point() else value for name, value in network.state_dict().items()}
    state = quantize_weights(linear_layers(network), weights, {})
    replace_linear_layers(network)
    network.load_state_dict(state, assign=True)
    network.register_to_config(quantization=quantization, weight_format="float32")
    return network.requires_grad_(False).eval()


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a contiguous NumPy array of a CPU tensor, which shares its memory if that is contiguous."""
    return np.ascontiguousarray(tensor.detach().numpy())


def packed_weights(network: Any, matrices: Sequence[Sequence[tuple[Any, ...]]], make: Callable[[Layers, Matrix], Any]) -> Any:
    """Return the weights of compiled passes, which are packed once and kept with the network; they may not change afterwards.

    They are made from the packed matrices of the layers and of the output, each given as quantized layers side by side.
    """
    key = tuple(layer.weight.data_ptr() for group in matrices for parts in group for layer in parts)
    known = network.__dict__.get("_packed_weights")
    if known is None or known[0] != key:
        packed = [[_pack(parts) for parts in group] for group in matrices]
        known = network.__dict__["_packed_weights"] = (key, make(join_layers(packed[:-1]), packed[-1][0]), packed)
    return known[1]


def _pack(layers: tuple[Any, ...]) -> Matrix:
    """Pack layers with the same input as one matrix."""
    weights, scales = ([as_array(getattr(each, name)) for each in layers] for name in ("weight", SCALE_SUFFIX))
    return pack_matrix(np.concatenate(weights), np.concatenate(scales))

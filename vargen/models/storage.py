"""Where weights are: in files, as integers with scales that are loaded as float32; and elsewhere, while hooks offload them.

The size of a packaged model is that of its weight files. One scale per 32 consecutive weights of a row keeps the error of a
matrix product at a third of a percent with int8, half the size of float16. int6 uses 63 of the 256 values of a byte: four times
the error, and a file that a wheel or Git compresses to three quarters of one in int8.
"""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers.models.modeling_utils import ModelMixin
from safetensors.torch import save
from torch import Tensor

from vargen.files import atomic_merge, expand_user
from vargen.folders.networks import WEIGHTS_STEM, NetworkFolder, SkipInit
from vargen.kernels.int8.load import CompiledCode
from vargen.models.quantization import (
    SCALE_SUFFIX,
    quantize_weights,
    quantized_layers,
    start_compiling,
    validate_placement,
    validate_quantization,
)

_BITS = {"int8": 8, "int6": 6}
WEIGHT_FORMATS = (*_BITS, "float16", "float32")
_SCALE = ".scale"
_SMALLEST = 2.0**-100  # minimum absolute maximum, for rows of zeros
_GROUP_COLUMNS = 32
_MIN_NUMEL = 2048  # minimum number of elements of a quantized matrix
_HEADER_DTYPES = {torch.int8: "I8", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}


def quantize_rows(weight: Tensor, groups: int = 1, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to integers with symmetric scales, one per row and group of consecutive columns.

    Scales keep 12 significant bits, rounded up: ``scale * value`` is then exact in float32, no value clips, and quantizing a
    dequantized matrix again gives the same bytes.

    Args:
        weight: floating [rows, columns], finite.
        groups: number of equal column groups, a divisor of ``columns``.
        bits: of an integer, 2 to 8. The greatest is 2 ** (bits - 1) - 1.

    Returns:
        int8 [rows, columns] and float32 [rows, groups], greater than 0. Each dequantized entry is within half its scale.
    """
    if weight.ndim != 2 or not weight.is_floating_point() or not torch.isfinite(weight).all():
        raise ValueError(f"expected a finite floating matrix, got {weight.dtype} {list(weight.shape)}")
    rows, columns = weight.shape
    if groups < 1 or columns % groups:
        raise ValueError(f"{columns} columns do not divide into {groups} groups")
    grouped = weight.detach().float().cpu().reshape(rows, groups, columns // groups)
    scale = grouped.abs().amax(dim=2).clamp_min(_SMALLEST) / (2 ** (bits - 1) - 1)
    scale = ((scale.view(torch.int32) + 0xFFF) & ~0xFFF).view(torch.float32)
    return torch.round(grouped / scale[..., None]).to(torch.int8).reshape(rows, columns), scale


def dequantize_rows(values: Tensor, scale: Tensor) -> Tensor:
    """Undo `quantize_rows`."""
    return (values.float().reshape(*scale.shape, -1) * scale[..., None]).reshape(values.shape)


class QuantizedStorageMixin(ModelMixin):
    """A `ModelMixin` with a `weight_format`, in which its weights are stored, in its config.

    None: as in diffusers, in their own dtype. ``"int8"`` and ``"int6"``: matrices and convolution filters as int8, which int6
    limits to -31..31, each with a float32 ``<name>.scale`` [rows, groups], where a group is 32 columns if these divide evenly
    and a whole row otherwise; other weights in `unquantized_dtype`. ``"float16"`` and ``"float32"``: all weights in that dtype.
    A network with ``quantization="int8"`` in its config computes with 8-bit integer products on a CPU, and stores int8 weights
    as they are, with a float32 ``<layer>.weight_scale`` [rows] each; see `vargen.models.quantization`.

    Attributes:
        unquantized_suffixes: suffixes of the names of weights that are never quantized in storage.
        float_layers: parts of the names of linear layers that compute in floating point in a quantized network.
        compiled_code: what its quantized passes are compiled to on a CPU.
    """

    unquantized_suffixes: ClassVar[tuple[str, ...]] = ()
    float_layers: ClassVar[tuple[str, ...]] = ()
    gpu_format: str | None = None  # see `quantize_weights_on_gpu`
    compiled_code: ClassVar[CompiledCode | None] = None
    config: Any

    def __init__(self) -> None:
        super().__init__()
        weight_format = self.config.get("weight_format")
        if weight_format is not None and weight_format not in WEIGHT_FORMATS:
            raise ValueError(f"unknown weight_format {weight_format!r}; expected one of {WEIGHT_FORMATS}")
        validate_quantization(self.config.get("quantization"))

    @property
    def quantized(self) -> bool:
        """Whether its products are those of 8-bit integers, on a CPU."""
        return self.config.get("quantization") is not None

    @property
    def pass_backend(self) -> str:
        """What runs the passes, as far as their time depends on it: empty for floating point."""
        if not self.quantized:
            return ""
        return "int8 operators" if self.compiled_code is None or self.compiled_code.load() is None else "compiled int8"

    def _apply(self, fn: Any, *args: Any, **options: Any) -> Any:
        super()._apply(fn, *args, **options)
        if self.quantized:
            validate_placement(self)
        return self

    def num_scale_groups(self, name: str, weight: Tensor) -> int | None:
        """Return the number of scales per row of a weight in an integer format, or None if it is not quantized."""
        if weight.ndim < 2 or weight.numel() < _MIN_NUMEL or not weight.is_floating_point():
            return None
        if name.endswith(self.unquantized_suffixes):
            return None
        columns = weight[0].numel()
        return 1 if columns % _GROUP_COLUMNS else columns // _GROUP_COLUMNS

    def unquantized_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a weight that an integer format does not quantize."""
        return torch.float32

    def layout(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Return shapes, and dtypes as in a safetensors header, of the tensors in a weight file with a `weight_format`."""
        shapes, dtypes = {}, {}
        for name, weight in self.state_dict().items():
            dtype, scales = self._storage_of(name, weight)
            shapes[name], dtypes[name] = tuple(weight.shape), _HEADER_DTYPES[dtype]
            if scales is not None:
                shapes[name + _SCALE], dtypes[name + _SCALE] = (weight.shape[0], scales), "F32"
        return shapes, dtypes

    def _storage_of(self, name: str, weight: Tensor) -> tuple[torch.dtype, int | None]:
        """Return the dtype that a weight is stored in, and its number of scales per row."""
        weight_format = self.config.weight_format
        if weight_format in _BITS and (scales := self.num_scale_groups(name, weight)) is not None:
            return torch.int8, scales
        if not weight.is_floating_point() or name.endswith(SCALE_SUFFIX):
            return weight.dtype, None
        return self.unquantized_dtype(name) if weight_format in _BITS else getattr(torch, weight_format), None

    def _to_file_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the weight file in the configured format."""
        packed: dict[str, Tensor] = {}
        for name, weight in self.state_dict().items():
            dtype, scales = self._storage_of(name, weight)
            if scales is None:
                packed[name] = weight.detach().to("cpu", dtype).contiguous()
            else:
                bits = _BITS[self.config.weight_format]
                values, packed[name + _SCALE] = quantize_rows(weight.detach().flatten(1), scales, bits)
                packed[name] = values.view(weight.shape)
        return packed

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str = "10GB",  # passed by diffusers only because it is named here
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write ``config.json`` and the weights as safetensors; with a `weight_format` in one file, atomically.

        Saving a model loaded from an integer format in float32 writes the same weights again.

        Raises:
            ValueError: for ``safe_serialization=False``, or a network whose weights are offloaded layer by layer; with a
                `weight_format`, for ``push_to_hub=True`` or a weight that is not finite.
        """
        require_weights(self, "saved")
        if self.gpu_format is not None:
            raise ValueError(f"a network with weights in {self.gpu_format} on a GPU is not saved; open it without quantization")
        if not safe_serialization:
            raise ValueError("safe_serialization must be True: pickled weights are not opened again")
        if self.config.get("weight_format") is None:
            more = {"variant": variant, "max_shard_size": max_shard_size, "push_to_hub": push_to_hub, **kwargs}
            super().save_pretrained(save_directory, is_main_process, **more)
            return
        if push_to_hub:
            raise ValueError(f"{type(self).__name__} saves local files only")
        if not is_main_process:
            return
        packed = self._to_file_tensors()
        name = f"{WEIGHTS_STEM}.{variant}.safetensors" if variant else f"{WEIGHTS_STEM}.safetensors"
        with atomic_merge(Path(save_directory)) as staged:
            (staged / name).write_bytes(save(packed, metadata={"format": "pt"}))
            (staged / "config.json").write_bytes(self.to_json_string().encode())

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        torch_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        quantization: str | None = None,
        variant: str | None = None,
        subfolder: str | None = None,
        use_safetensors: bool = True,
        low_cpu_mem_usage: bool = True,
    ) -> Self:
        """Load a folder written by `save_pretrained`, on the CPU and in evaluation mode.

        Args:
            torch_dtype, dtype: dtype of its parameters. Default: as stored, and float32 for a `weight_format`.
            quantization: ``"int8"`` to compute with int8 weights; see `vargen.models.quantization`. Default: as in the folder.
            use_safetensors, low_cpu_mem_usage: accepted as in diffusers; both are always so.

        Raises:
            ValueError: naming the file and the tensor, if the folder does not hold exactly the tensors that its configuration
                asks for. Also for an unknown quantization, or another dtype than float32 with it.
        """
        folder = expand_user(str(pretrained_model_name_or_path), "folder") / (subfolder or "")
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder with a saved {cls.__name__}")
        return load_network(NetworkFolder(folder, cls, variant), dtype or torch_dtype, quantization)


def load_network(stored: NetworkFolder, dtype: torch.dtype | None = None, quantization: str | None = None) -> Any:
    """Read the weights of a network, on the CPU and in evaluation mode; arguments and errors as of `from_pretrained`.

    Weights of a `weight_format` are finite, and its integers become int8 weights of a quantized network directly.
    """
    validate_quantization(quantization)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    changed = {}
    if quantization is not None and not quantized_layers(stored.network):
        if "quantization" not in stored.config:
            raise ValueError(f"quantization={quantization!r} is not supported by {stored.network_class.__name__}; leave it out")
        changed = {"quantization": quantization, "weight_format": stored.config["weight_format"] or "float32"}
    with SkipInit():
        network = stored.build(**changed)
    layers = quantized_layers(network)
    if layers and dtype not in (None, torch.float32):
        raise ValueError(f"dtype must be float32 with quantization='int8', whose other steps compute in it, got {dtype}")
    weights = stored.read()
    integers: dict[str, tuple[Tensor, Tensor]] = {}
    if stored.config.get("weight_format") is not None:
        weights, integers = _dequantize(weights, stored, {f"{name}.weight" for name in layers})
    if layers:
        start_compiling(network)
        dtype = torch.float32
    if dtype is not None:
        weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    if layers:
        weights = quantize_weights(layers, weights, integers)
    network.load_state_dict(weights, assign=True)
    network.requires_grad_(not layers)
    return network.eval() if dtype is None or layers else network.to(dtype).eval()


def _dequantize(
    tensors: dict[str, Tensor], stored: NetworkFolder, kept: Container[str]
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Convert the tensors of a `weight_format`: floats to float32, and int8 matrices too.

    Those that are named in `kept` are returned apart, as int8 [rows, columns] with their scales [rows, groups].
    """
    for name, value in tensors.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"{stored.folder}: tensor {name!r} holds values that are not finite")
    scaled = {name for name in tensors if name + _SCALE in tensors and tensors[name].dtype == torch.int8}
    found: dict[str, Tensor] = {}
    integers: dict[str, tuple[Tensor, Tensor]] = {}
    for name, value in tensors.items():
        if name in scaled and name in kept:
            integers[name] = (value.flatten(1), tensors[name + _SCALE])
        elif name in scaled:
            found[name] = dequantize_rows(value.flatten(1), tensors[name + _SCALE]).view(value.shape)
        elif name.removesuffix(_SCALE) not in scaled or not name.endswith(_SCALE):
            found[name] = value.float() if value.is_floating_point() else value
    return found, integers


# -- weights that hooks of accelerate or diffusers move or cast while a module runs: to be read in its `forward` only ----------


def is_offloaded(module: Any) -> bool:
    """Whether accelerate moves the weights of a module, or of its parts, to another device while they run."""
    return hasattr(module, "_hf_hook") or weights_are_elsewhere(module)


def read_weight(module: Any, name: str = "weight") -> Tensor:
    """Return a parameter or buffer of a module for use outside its `forward`, on the device where the module runs.

    While the module is offloaded, this is a copy without a gradient.
    """
    hook, weight = getattr(module, "_hf_hook", None), getattr(module, name)
    if hook is None or not weight.is_meta:
        return weight if hook is None else weight.detach().to(find_device(module))
    hook.pre_forward(module)
    weight = getattr(module, name).detach().clone()
    hook.post_forward(module, None)
    return weight


def find_device(module: Any) -> torch.device:
    """Return the device where a module runs. While accelerate offloads it, its weights are on another one."""
    for part in module.modules():
        hooks = getattr(part, "_hf_hook", None)
        for hook in getattr(hooks, "hooks", [hooks]):
            place = getattr(hook, "execution_device", None)
            if place is not None:
                return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return next(module.parameters()).device


def weights_are_elsewhere(module: Any) -> bool:
    """Whether hooks of accelerate keep weights of a module somewhere else, and load them for each layer's `forward`."""
    hooked = any(hasattr(part, "_hf_hook") for part in module.modules())
    return hooked and any(weight.is_meta for weight in module.parameters())


def require_weights(module: Any, action: str, name: str = "") -> None:
    """Raise ValueError if weights of a module are elsewhere; `action` says what cannot be done, such as "saved"."""
    if weights_are_elsewhere(module):
        raise ValueError(
            f"{name or type(module).__name__} cannot be {action} while its weights are offloaded: call remove_all_hooks() of "
            "the pipeline first, or accelerate.hooks.remove_hook_from_module(network, recurse=True)"
        )


def validate_offloading(transformer: Any) -> None:
    """Raise ValueError for a quantized network that is offloaded: its passes read the weights of all layers at once."""
    if transformer.quantized:
        require_weights(transformer, "run with quantization='int8'")

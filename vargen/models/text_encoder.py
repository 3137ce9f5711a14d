"""A MiniLM sentence encoder as a diffusers component whose weights are stored as int8 with row scales."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from vargen.compat import ensure_torchvision
from vargen.files import whole_files

ensure_torchvision()

from diffusers.configuration_utils import ConfigMixin, register_to_config

# DiffusionPipeline looks for the name `ModelMixin` in this very module to learn how to load the component.
from diffusers.models.modeling_utils import ModelMixin

WEIGHT_FORMATS = ("int8", "float16", "float32")
_WEIGHTS_STEM = "diffusion_pytorch_model"
_SCALE = ".scale"
_LEVELS = 127
_SMALLEST = 2.0**-100  # stands in for the largest value of a row of zeros
_GROUP_COLUMNS = 32
_HEADER_DTYPES = {torch.int8: "I8", torch.float16: "F16", torch.float32: "F32"}
_UNQUANTIZED = ("position_embeddings.weight", "token_type_embeddings.weight")
# Options of `ModelMixin.from_pretrained` that say how to fetch or place weights: nothing to do for a small
# local file, yet DiffusionPipeline passes them to every component.
_LOADING_OPTIONS = frozenset(
    "cache_dir force_download proxies output_loading_info local_files_only token revision subfolder "
    "max_memory offload_folder offload_state_dict low_cpu_mem_usage use_safetensors use_flashpack "
    "flashpack_kwargs quantization_config dduf_entries disable_mmap parallel_config provider sess_options "
    "provider_options trust_remote_code".split()
)


def quantize_rows(weight: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to int8 with symmetric scales, one per row and group of neighbouring columns.

    Scales keep 12 significant bits, rounded up: ``scale * value`` is then exact in float32, no value clips,
    and quantizing a dequantized matrix again gives the same bytes.

    Args:
        weight: floating [rows, columns], finite.
        groups: number of equal column groups, a divisor of ``columns``.

    Returns:
        int8 [rows, columns] in -127..127 and float32 [rows, groups], greater than 0. Each entry of the
        dequantized matrix is within half its scale of ``weight``.

    Raises:
        ValueError: ``weight`` is not a finite floating matrix, or does not divide into ``groups``.
    """
    if weight.ndim != 2 or not weight.is_floating_point() or not torch.isfinite(weight).all():
        raise ValueError(f"expected a finite floating matrix, got {weight.dtype} {list(weight.shape)}")
    rows, columns = weight.shape
    if groups < 1 or columns % groups:
        raise ValueError(f"{columns} columns do not divide into {groups} groups")
    grouped = weight.detach().float().cpu().reshape(rows, groups, columns // groups)
    scale = grouped.abs().amax(dim=2).clamp_min(_SMALLEST) / _LEVELS
    scale = ((scale.view(torch.int32) + 0xFFF) & ~0xFFF).view(torch.float32)
    return torch.round(grouped / scale[..., None]).to(torch.int8).reshape(rows, columns), scale


def dequantize_rows(values: Tensor, scale: Tensor) -> Tensor:
    """Undo `quantize_rows`: int8 [rows, columns] and float32 [rows, groups] to float32 [rows, columns]."""
    return (values.float().reshape(*scale.shape, -1) * scale[..., None]).reshape(values.shape)


def _groups(name: str, parameter: Tensor) -> int | None:
    """How many scales a row of this weight has in the int8 format; None if it stays in floating point."""
    # A row of the word embeddings meets one token only; linear layers add up errors over every token, and
    # position and segment embeddings enter all of them: these get finer scales or none.
    if parameter.ndim != 2 or name.endswith(_UNQUANTIZED):
        return None
    columns = parameter.shape[1]
    return 1 if "word_embeddings" in name or columns % _GROUP_COLUMNS else columns // _GROUP_COLUMNS


def _plain_dtype(name: str, weight_format: str) -> torch.dtype:
    """The stored dtype of a weight that is not quantized."""
    small = weight_format == "int8" and name.endswith(_UNQUANTIZED)
    return torch.float16 if small or weight_format == "float16" else torch.float32


class MiniLMTextEncoder(ModelMixin, ConfigMixin):
    """BERT encoder that gives one feature vector per token (no pooling).

    Saves and loads like any diffusers model. With ``weight_format="int8"`` the weight file holds the matrices
    as int8 with a float32 ``<name>.scale`` each ([rows, groups]: one group for word embeddings, one per 32
    columns for linear layers), position and segment embeddings as float16 and vectors as float32; otherwise
    everything is float16 or float32.

    Args:
        vocab_size: number of tokens.
        hidden_size: feature width, 384 for MiniLM-L6; a multiple of ``num_attention_heads``.
        num_hidden_layers: number of transformer layers.
        num_attention_heads: attention heads per layer.
        intermediate_size: width of the feed-forward layers.
        max_position_embeddings: longest accepted sequence.
        type_vocab_size: number of segment embeddings.
        layer_norm_eps: epsilon of the layer norms.
        weight_format: how `save_pretrained` stores the weights: "int8", "float16" or "float32".

    Raises:
        ValueError: ``weight_format`` is unknown, or sizes do not fit each other.
    """

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 384,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 12,
        intermediate_size: int = 1536,
        max_position_embeddings: int = 512,
        type_vocab_size: int = 2,
        layer_norm_eps: float = 1e-12,
        weight_format: str = "int8",
    ) -> None:
        super().__init__()
        if weight_format not in WEIGHT_FORMATS:
            raise ValueError(f"unknown weight_format {weight_format!r}; expected one of {WEIGHT_FORMATS}")
        # Importing transformers takes seconds; code that never encodes text should not pay for it.
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            intermediate_size=intermediate_size,
            max_position_embeddings=max_position_embeddings,
            type_vocab_size=type_vocab_size,
            layer_norm_eps=layer_norm_eps,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Encode token ids.

        Args:
            input_ids: int64 [B, T] with T up to ``max_position_embeddings``.
            attention_mask: [B, T], 1 for tokens and 0 for padding; default all ones.

        Returns:
            float32 [B, T, hidden_size]; rows at padding are meaningless.

        Raises:
            ValueError: shapes do not fit.
        """
        if input_ids.ndim != 2 or input_ids.shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"input_ids must be [B, T] with T <= {self.config.max_position_embeddings}, "
                f"got {list(input_ids.shape)}"
            )
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask {list(attention_mask.shape)} does not fit input_ids {list(input_ids.shape)}"
            )
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.float()

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in the weight file, by name."""
        expected = _expected(dict(self.named_parameters()), self.config.weight_format)
        return {name: shape for name, (_, shape) in expected.items()}

    def stored_dtypes(self) -> dict[str, str]:
        """Their dtypes, as a safetensors header names them."""
        expected = _expected(dict(self.named_parameters()), self.config.weight_format)
        return {name: _HEADER_DTYPES[dtype] for name, (dtype, _) in expected.items()}

    def _pack(self) -> dict[str, Tensor]:
        """The tensors of the weight file in the configured format."""
        packed: dict[str, Tensor] = {}
        weight_format = self.config.weight_format
        for name, parameter in self.named_parameters():
            groups = _groups(name, parameter)
            if weight_format == "int8" and groups is not None:
                packed[name], packed[name + _SCALE] = quantize_rows(parameter, groups)
            else:
                packed[name] = parameter.detach().to("cpu", _plain_dtype(name, weight_format)).contiguous()
        return packed

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        save_function: Callable[..., None] | None = None,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str = "10GB",
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write ``config.json`` and the weight file (always safetensors, one shard) atomically.

        Saving a model loaded from int8 in float32 writes the same weights again.

        Raises:
            ValueError: ``safe_serialization=False``, ``push_to_hub=True``, or a weight is not finite.
            OSError: the folder cannot be written.
        """
        if not safe_serialization or push_to_hub:
            raise ValueError("MiniLMTextEncoder saves local safetensors files only")
        if not is_main_process:
            return
        packed = self._pack()
        with whole_files(Path(save_directory)) as staged:
            (staged / _weights_name(variant)).write_bytes(save(packed, metadata={"format": "pt"}))
            (staged / "config.json").write_bytes(self.to_json_string().encode())

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> MiniLMTextEncoder:
        """Load a folder written by `save_pretrained`, dequantized to float32, in evaluation mode.

        Args:
            pretrained_model_name_or_path: the folder.
            **kwargs: ``subfolder``; ``torch_dtype`` (or ``dtype``) to convert to; ``variant`` of the file
                name; ``device_map``, a device name or ``{"": device}``. The options with which diffusers
                steers downloads and memory are accepted without effect.

        Raises:
            OSError: the folder or a file is missing or unreadable, or ``config.json`` is not valid.
            ValueError: the weight file is corrupt, or does not hold exactly the tensors, shapes and dtypes
                that the configuration asks for; the message names the file and the tensor.
            TypeError: an unknown option.
        """
        dtype = kwargs.pop("torch_dtype", None)
        dtype = kwargs.pop("dtype", None) or dtype
        variant = kwargs.pop("variant", None)
        device_map = kwargs.pop("device_map", None)
        folder = Path(pretrained_model_name_or_path) / (kwargs.pop("subfolder", None) or "")
        unknown = sorted(set(kwargs) - _LOADING_OPTIONS)
        if unknown:
            raise TypeError(f"from_pretrained got unknown options: {', '.join(unknown)}")
        if not folder.is_dir():
            raise OSError(f"{folder} is not a folder with a saved MiniLMTextEncoder")
        model: MiniLMTextEncoder = cls.from_config(cls.load_config(str(folder)))
        path = folder / _weights_name(variant)
        weights = _read_weights(path, dict(model.named_parameters()), model.config.weight_format)
        for name, parameter in model.named_parameters():
            parameter.data = weights[name].to(dtype if isinstance(dtype, torch.dtype) else torch.float32)
        if device_map is not None:
            model = model.to(device_map[""] if isinstance(device_map, dict) else device_map)
        return model.eval()


def _weights_name(variant: str | None) -> str:
    return f"{_WEIGHTS_STEM}.{variant}.safetensors" if variant else f"{_WEIGHTS_STEM}.safetensors"


def _expected(parameters: dict[str, Tensor], weight_format: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes in a weight file, by name."""
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, parameter in parameters.items():
        groups = _groups(name, parameter) if weight_format == "int8" else None
        dtype = _plain_dtype(name, weight_format) if groups is None else torch.int8
        expected[name] = (dtype, tuple(parameter.shape))
        if groups is not None:
            expected[name + _SCALE] = (torch.float32, (parameter.shape[0], groups))
    return expected


def _read_weights(path: Path, parameters: dict[str, Tensor], weight_format: str) -> dict[str, Tensor]:
    """Read and check a weight file; float32 tensors by parameter name (errors: see `from_pretrained`)."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        stored = load_file(path)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    expected = _expected(parameters, weight_format)
    for name in sorted(expected.keys() | stored.keys()):
        if name not in stored:
            raise ValueError(f"{path}: tensor {name!r} is missing")
        if name not in expected:
            raise ValueError(f"{path}: unexpected tensor {name!r}")
        dtype, shape = expected[name]
        if stored[name].dtype != dtype or tuple(stored[name].shape) != shape:
            raise ValueError(
                f"{path}: tensor {name!r} is {stored[name].dtype} {list(stored[name].shape)}, "
                f"expected {dtype} {list(shape)}"
            )
        if dtype != torch.int8 and not torch.isfinite(stored[name]).all():
            raise ValueError(f"{path}: tensor {name!r} holds values that are not finite")
    scales = {name: stored.get(name + _SCALE) for name in parameters}
    return {
        name: stored[name] if scale is None else dequantize_rows(stored[name], scale)
        for name, scale in scales.items()
    }

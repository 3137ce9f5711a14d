"""Networks of vargen and diffusers in folders: configuration and headers of weights are checked before any weight is read.

Most sizes of a configuration are compared with the weights. Sizes that weights do not determine (grids, frames, caption rows)
set the size of tables and caches, where a wrong number could require more memory than any machine has.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vargen.folders.json_files import BOOL, TEXT, Allowed, Kind, expect, read_config, whole
from vargen.values import NumberRange
from vargen.weight_files import (
    MAX_LAYERS,
    find_weight_files,
    list_shapes,
    read_headers,
    validate_layer_counts,
    validate_weights,
)

WEIGHTS_STEM = "diffusion_pytorch_model"
_MAX_SIZE = 2**20  # maximum of widths, vocabularies and other values not listed here
_MAX_LENGTH = 64  # maximum length of lists, such as levels of a tokenizer or scales of an image
_INTEGER_LIMITS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("n_layer", "depth", "num_hidden_layers", "num_layers"), (1, MAX_LAYERS)),
    **dict.fromkeys(("blocks", "conv_blocks", "transformer_blocks", "num_res_blocks"), (0, MAX_LAYERS)),
    **dict.fromkeys(("heads", "shared_phi"), (1, MAX_LAYERS)),
    **dict.fromkeys(("grid_size", "low_grid"), (1, 256)),
    **dict.fromkeys(("ch_mult", "encoder_ch_mult", "decoder_ch_mult", "patch", "patch_size"), (1, 64)),
    **dict.fromkeys(("stride", "spatial_stride", "temporal_stride", "fps", "block_frames", "scales"), (1, 1024)),
    **dict.fromkeys(("height", "width", "size", "image_size"), (1, 8192)),
    **dict.fromkeys(("cls_token_num", "caption_rows", "text_len", "max_position_embeddings"), (1, 65_536)),
    "motion_levels": (0, 1000),
}
_FLOAT_LIMITS: dict[str, tuple[float, float]] = {
    "norm_eps": (0, 1),
    "layer_norm_eps": (0, 1),
    "dropout": (0, 1),
    "rope_base": (1, 1e9),
    "mlp_ratio": (0.001, 64),
    "ffn_dim_multiplier": (0, 64),
}


_type_hints = cache(get_type_hints)
_RANDOM = {Tensor.normal_, Tensor.uniform_}


class SkipInit(TorchFunctionMode):
    """Leaves the parameters of a network uninitialized while it is built; its weights are read afterwards."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init" or func in _RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


class NetworkFolder:
    """A network in a folder, whose configuration describes its weights; no weight was read.

    Numbers of layers are compared before a network of that size is built, even on the meta device: a network class has
    `layer_prefixes`, by configuration key of such a number the prefixes before the layer index in names of weights.

    Args:
        folder: its folder.
        network_class: a `ModelMixin` of vargen or diffusers, which the caller chooses.
        variant: variant in the weight file's name, such as "fp16", as in diffusers.

    Attributes:
        network: the network without memory, on the meta device, in evaluation mode.
        config: its configuration, including default values that the file omits.
    """

    def __init__(self, folder: Path, network_class: Any, variant: str | None = None):
        self.folder, self.network_class = folder, network_class
        file = folder / "config.json"
        self._values = read_config(file)
        if self._values.get("quantization_config"):
            raise ValueError(
                f"{file} has a quantization_config, which vargen cannot load: use weights that are not quantized, or saved "
                "with weight_format='int8'"
            )
        self.files = find_weight_files(folder, WEIGHTS_STEM, variant)
        header, _ = read_headers(self.files)
        validate_layer_counts(header, self._values, getattr(network_class, "layer_prefixes", {}), file)
        _validate_config(network_class, self._values, file)
        try:
            with torch.device("meta"), SkipInit():
                self.network = self.build().eval()
        except Exception as error:
            raise ValueError(f"{file} does not describe a {network_class.__name__}: {error}") from error
        self.config: Mapping[str, Any] = self.network.config
        has_format = self.config.get("weight_format") is not None
        shapes, dtypes = self.network.layout() if has_format else (list_shapes(self.network.state_dict()), None)
        validate_weights(header, shapes, str(folder), dtypes)

    def build(self, **changed: Any) -> Any:
        """Return a new network of this configuration, apart from what is `changed`, with uninitialized weights."""
        return self.network_class.from_config({**self._values, "_class_name": self.network_class.__name__, **changed})

    def read(self) -> dict[str, Tensor]:
        """Read the stored tensors by name."""
        found: dict[str, Tensor] = {}
        for file in self.files:
            try:
                found |= load_file(file)
            except (SafetensorError, OSError, ValueError) as error:
                raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
        return found


# -- configurations -------------------------------------------------------------------------------------------------------


def _validate_config(network_class: type, config: Mapping[str, Any], file: Path) -> None:
    """Validate a configuration against the argument types of a network's class, without building the network."""
    for name, hint in _type_hints(network_class.__init__).items():  # type: ignore[misc]
        types = get_args(hint) if NoneType in get_args(hint) else (hint,)
        kind = _find_kind(name, types[0])
        if name not in config or kind is None or (config[name] is None and NoneType in types):
            continue
        expect(kind.fits(config[name]), name, config[name], file, kind.allowed + " or null" * (NoneType in types))


def _find_kind(name: str, hint: Any) -> Allowed | None:
    """Return the values that an argument may have; None for a choice of texts, which the class itself validates."""
    each = whole(*_INTEGER_LIMITS.get(name, (1, _MAX_SIZE)))
    number = NumberRange(*_FLOAT_LIMITS.get(name, (-1e9, 1e9)))
    kinds: dict[Any, Allowed] = {bool: BOOL, str: TEXT, int: each, float: number}
    if hint in kinds:
        return kinds[hint]
    if get_origin(hint) is None or int not in get_args(hint):
        return None

    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and 1 <= len(value) <= _MAX_LENGTH and all(map(each.fits, value))

    return Kind(fits, f"a list of 1 to {_MAX_LENGTH} times {each.allowed}")


def config_value(config: Any, setting: str) -> Any:
    """Return a setting of a configuration, which is a mapping (of a file or diffusers) or an object (of transformers)."""
    return config.get(setting) if isinstance(config, Mapping) else getattr(config, setting, None)


def require_equal(configs: Mapping[str, Any], name: str, setting: str, other: str, other_setting: str) -> None:
    """Raise ValueError if a setting of a component differs from that of another. Missing components and settings are equal."""
    found, expected = config_value(configs.get(name), setting), config_value(configs.get(other), other_setting)
    plain = [list(value) if isinstance(value, tuple) else value for value in (found, expected)]
    if found is not None and configs.get(other) is not None and plain[0] != plain[1]:
        raise ValueError(
            f"{name} and {other} do not belong together: {setting} of {name} is {found!r}, and {other_setting} of {other} is "
            f"{expected!r}"
        )

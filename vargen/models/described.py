"""Checks that a folder's weights match the network that its configuration describes, from file headers only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.config_bounds import check_config
from vargen.models.heads.medusa import MedusaDrafter
from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.models.tokenizers.vq import VQModel
from vargen.models.var import VARTransformer
from vargen.models.weight_storage import QuantizedStorageMixin
from vargen.weight_files import check_layer_counts, check_weights, read_weight_header

# By configuration key of a number of layers: the prefixes before the layer index in names of weights.
_LAYERS: dict[type, dict[str, tuple[str, ...]]] = {
    LlamaGenTransformer: {"n_layer": ("layers.",)},
    VQModel: {
        "num_res_blocks": ("encoder.conv_blocks.0.res.",),
        "encoder_ch_mult": ("encoder.conv_blocks.",),
        "decoder_ch_mult": ("decoder.conv_blocks.",),
    },
    MultiScaleVQModel: {  # for both architectures
        "num_res_blocks": ("encoder.down.0.block.", "encoder.levels.0."),
        "transformer_blocks": ("encoder.trunk.blocks.",),
        "shared_phi": ("quantize.quant_resi.qresi_ls.",),
    },
    VARTransformer: {"depth": ("blocks.",)},
    MiniLMTextEncoder: {"num_hidden_layers": ("bert.encoder.layer.",)},
    MedusaDrafter: {"heads": ("ahead.",), "blocks": ("ahead.0.blocks.",)},
    CausalVideoTransformer: {"num_layers": ("blocks.",)},
    CausalVideoVAE: {"conv_blocks": ("encoder.levels.0.",), "transformer_blocks": ("encoder.trunk.blocks.",)},
    TokenUpsampler: {"blocks": ("low.",)},
}


def read_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ValueError: if the file is missing, not JSON, or not an object; the message names the file.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing; the folder is incomplete, download or convert it again")
    try:
        content = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(content).__name__}")
    return content


def check_described(kind: Any, config: Mapping[str, Any], folder: Path, variant: str | None = None) -> Mapping[str, Any]:
    """Compare a folder's weight file with the network that its configuration describes.

    Args:
        kind: class of the network.
        config: content of the folder's `config.json`.
        variant: variant in the weight file's name, as in diffusers.

    Returns:
        The configuration, including default values that the file omits.

    Raises:
        ValueError: for a mismatch; the message names the file and the first wrong value or tensors.
    """
    file = folder / "config.json"
    if config.get("quantization_config"):
        raise ValueError(f"{file} has a quantization_config, which would hand the weights to another library to read")
    found = read_weight_header(folder, "diffusion_pytorch_model", variant)
    check_layer_counts(found, config, _LAYERS.get(kind, {}), file)
    try:
        check_config(kind, config)
        with torch.device("meta"):
            network = kind.from_config(config)
    except Exception as error:
        raise ValueError(f"{file} does not describe a {kind.__name__}: {error}") from error
    if isinstance(network, QuantizedStorageMixin) and network.config.weight_format is not None:
        check_weights(found, network.stored_shapes(), str(folder), network.stored_dtypes())
    else:
        check_weights(found, _shapes(network), str(folder))
    return network.config


def _shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in network.state_dict().items()}

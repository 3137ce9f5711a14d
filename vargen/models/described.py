"""Whether a folder's weights are those of the network that its configuration describes: told by headers, without memory."""

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

# What stands before a layer's number in the weight files, by what the configuration calls how many there are.
_LAYERS: dict[type, dict[str, tuple[str, ...]]] = {
    LlamaGenTransformer: {"n_layer": ("layers.",)},
    VQModel: {
        "num_res_blocks": ("encoder.conv_blocks.0.res.",),
        "encoder_ch_mult": ("encoder.conv_blocks.",),
        "decoder_ch_mult": ("decoder.conv_blocks.",),
    },
    MultiScaleVQModel: {  # of either architecture
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
    """The object of a JSON file.

    Raises:
        ValueError: naming the file, if it is missing, not JSON, or something else than an object.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing; the folder is incomplete, download or convert it again")
    try:
        content = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8, or nested without end
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(content).__name__}")
    return content


def check_described(kind: Any, config: Mapping[str, Any], folder: Path, variant: str | None = None) -> Mapping[str, Any]:
    """Compare a folder's weight file with the network of a class that its configuration describes.

    Args:
        config: the content of its `config.json`. variant: part of the weight file's name, as diffusers has it.

    Returns:
        The configuration, with the defaults of what the file leaves out.

    Raises:
        ValueError: naming the file and the first value or tensors that are wrong.
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

"""A component's folder, checked without loading a weight: its configuration, its weight files' headers, its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vargen.files import expanded
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.compact import CompactModel
from vargen.models.eagle import EagleDrafter
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.medusa import MedusaDrafter
from vargen.models.multi_scale_vq import MultiScaleVQModel
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.upsampler import TokenUpsampler
from vargen.models.var import VARTransformer
from vargen.models.video_preview import PreviewDecoder
from vargen.models.video_vae import CausalVideoVAE
from vargen.models.vq import VQModel
from vargen.models.weights import Header, check_dtypes, check_layers, check_weights, read_header, stored_weights
from vargen.pipelines.trust import check_no_code, check_no_code_keys

_AGAIN = "the folder is incomplete, download or convert it again"
# What stands before a layer's number in the weight files, by what the configuration calls how many there are.
_LAYERS: dict[type, dict[str, str]] = {
    LlamaGenTransformer: {"n_layer": "layers."},
    VQModel: {
        "num_res_blocks": "encoder.conv_blocks.0.res.",
        "encoder_ch_mult": "encoder.conv_blocks.",
        "decoder_ch_mult": "decoder.conv_blocks.",
    },
    MultiScaleVQModel: {},  # whose names follow from its architecture
    VARTransformer: {"depth": "blocks."},
    MiniLMTextEncoder: {"num_hidden_layers": "bert.encoder.layer."},
    EagleDrafter: {},  # of one layer
    MedusaDrafter: {"heads": "ahead."},
    CausalVideoTransformer: {"num_layers": "blocks."},
    CausalVideoVAE: {},  # as MultiScaleVQModel
    PreviewDecoder: {},  # of one shape
    TokenUpsampler: {"blocks": "low."},
}
# Any one of these holds a tokenizer's vocabulary.
_VOCABULARIES = {
    "BertTokenizer": ("tokenizer.json", "vocab.txt"),
    "T5Tokenizer": ("tokenizer.json", "spiece.model"),
}


def saved_network(folder: Any, part: str, name: str) -> Path:
    """The folder of a saved network: that of a run, in which it is `part`, or its own; checked to hold no code.

    Raises:
        FileNotFoundError: naming `name`, if there is none.
        ValueError: for code in the folder.
    """
    given = expanded(folder, name)
    for place in (given / part, given):
        if (place / "config.json").is_file():
            check_no_code(place)
            return place
    raise FileNotFoundError(f"{name} must be a run's folder with {part}/, or a saved network, got {str(given)!r}")


def read_object(file: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
        ValueError: naming the file, if it is missing, not JSON, or something else than an object.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing; {_AGAIN}")
    try:
        content = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8, or nested without end
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(content).__name__}")
    return content


def check_component(folder: Path, kind: type, variant: str | None = None) -> Mapping[str, Any]:
    """Compare a component's weight file with the network that its config describes, by header only.

    Args:
        variant: part of the weight file's name, such as "fp16", as diffusers has it.

    Returns:
        The configuration, with the defaults of what the file leaves out.

    Raises:
        ValueError: naming the file and the first tensors that are wrong.
    """
    file = folder / "config.json"
    config = read_object(file)
    check_no_code_keys(config, file)
    if config.get("quantization_config"):
        raise ValueError(f"{file} has a quantization_config, which would hand the weights to another library to read")
    found = stored_weights(folder, "diffusion_pytorch_model", variant)
    check_layers(found, config, _LAYERS[kind], file)
    try:
        with torch.device("meta"):
            network: Any = kind.from_config(config)  # type: ignore[attr-defined]
    except Exception as error:
        raise ValueError(f"{file} does not describe a {kind.__name__}: {error}") from error
    _check_network(network, found, str(folder))
    return network.config


def _check_network(network: nn.Module, found: Header, where: str) -> None:
    if isinstance(network, CompactModel) and network.config.weight_format is not None:
        check_weights(found, network.stored_shapes(), where, network.stored_dtypes())
    else:
        check_weights(found, {key: tuple(value.shape) for key, value in network.state_dict().items()}, where)


def check_t5(folder: Path) -> Mapping[str, Any]:
    """Check a text encoder of transformers, which names tensors anew as it loads: no tensor by its name.

    Returns:
        Its configuration.

    Raises:
        ValueError: no config, or one of another kind or size than the weights; weights missing, damaged or not of floats.
    """
    file = folder / "config.json"
    config = read_object(file)
    check_no_code_keys(config, file)
    if config.get("model_type") != "t5":
        raise ValueError(f"{file} has model_type: {config.get('model_type')!r}, expected 't5'")
    adapter = folder / "adapter_config.json"
    if adapter.exists():  # transformers would take the weights from the model that it names, over the network
        raise ValueError(f"{adapter} makes this the adapter of another model; merge it into the encoder's weights")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{folder / 'model.safetensors'} is missing; {_AGAIN}")
    found = {name: stored for weight in weights for name, stored in read_header(weight).items()}
    check_layers(found, config, {"num_layers": "encoder.block."}, file)
    if not config.get("quantization_config"):  # which has its own reader, and types of its own
        check_dtypes(found, str(folder))
    return config


def check_tokenizer(folder: Path, kind: str) -> None:
    """Check a tokenizer of transformers, which reads a folder without one as that of another library and asks for that.

    Args:
        kind: name of its class.

    Raises:
        ValueError: a file is missing or damaged.
    """
    from tokenizers import Tokenizer

    needed = _VOCABULARIES.get(kind.removesuffix("Fast"), ("tokenizer.json",))
    if not any((folder / name).is_file() for name in needed):
        others = "".join(f", and so is {name}" for name in needed[1:])
        raise ValueError(f"{folder / needed[0]} is missing{others}; {_AGAIN}")
    for file in sorted(folder.glob("*.json")):
        if file.name != "tokenizer.json":
            check_no_code_keys(read_object(file), file)
            continue
        read_object(file)  # says it more clearly where it is not even JSON
        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # of its own kind, which is none of Python's
            raise ValueError(f"{file} is damaged or not a tokenizer: {error}; download or convert it again") from error

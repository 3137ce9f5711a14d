"""What a video model takes from a folder of Wan2.1: the autoencoder, the UMT5 text encoder, and its tokenizer.

The folder has either the original files or those of diffusers. Original weights get the names of diffusers and transformers;
parts in their formats are copied.

Sources: Wan Team 2025, "Wan" (arXiv:2503.20314); Chung et al. 2023, "UniMax" (arXiv:2304.09151) for UMT5.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vargen.convert.state_dicts import (
    State,
    build_network,
    count_modules,
    describe_network,
    read_checkpoint,
    require_shape,
)
from vargen.folders.json_files import read_config
from vargen.folders.networks import NetworkFolder
from vargen.folders.tokenizers import validate_tokenizer_files
from vargen.folders.transformers_networks import StoredNetwork
from vargen.models.text_encoder import TEXT_ENCODERS
from vargen.models.tokenizers.video_vae import AutoencoderKLWan

VAE_FILE, TEXT_FILE, TOKENIZER_FOLDER = "Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth", "google/umt5-xxl"
_VAE_FILE_22 = "Wan2.2_VAE.pth"
_DIFFUSERS_22 = "Wan2.2's autoencoder: give Wan2.2-TI2V-5B in diffusers' format, which has the statistics of its latents"
_CHANNELS = 16  # of the latents whose mean and deviation diffusers has; the original file has none
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model", "added_tokens.json",
)  # fmt: skip
_FAST = {"T5Tokenizer": "T5TokenizerFast"}  # the slow class needs the package sentencepiece

_VAE_NAMES = (  # original to diffusers, as regular expressions, in order
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
    (r"^(encoder|decoder)\.conv1\.(?=weight|bias)", r"\1.conv_in."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"^encoder\.downsamples\.", "encoder.down_blocks."),
)
_TEXT_NAMES = {
    "norm1": "layer.0.layer_norm",
    **{f"attn.{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}


@dataclass(frozen=True)
class WanPart:
    """A component that was validated by names and shapes, and is not read yet.

    Attributes:
        kind: its class.
        config: its configuration.
        write: writes it to a folder.
    """

    kind: type
    config: Mapping[str, Any]
    write: Callable[[Path], None]


def read_wan_parts(folder: Path) -> dict[str, WanPart]:
    """Return the components `vae`, `text_encoder` and `tokenizer` of a folder of Wan2.1, or of Wan2.2 in diffusers' format."""
    if (folder / _VAE_FILE_22).exists() and not (folder / "vae").is_dir():
        raise ValueError(f"wan {str(folder)!r} holds {_VAE_FILE_22}, {_DIFFUSERS_22}")
    missing = [
        f"{file} or {part}/"
        for part, file in (("vae", VAE_FILE), ("text_encoder", TEXT_FILE), ("tokenizer", f"{TOKENIZER_FOLDER}/"))
        if not (folder / part).is_dir() and not (folder / file).exists()
    ]
    if missing:
        raise ValueError(f"wan {str(folder)!r} must hold Wan2.1, original or in diffusers' format; it has no {missing[0]}")
    return {"vae": _read_vae(folder), "text_encoder": _read_text_encoder(folder), "tokenizer": _read_tokenizer(folder)}


def _copy_files(source: Path, patterns: tuple[str, ...]) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        target.mkdir()
        for pattern in patterns:
            for file in source.glob(pattern):
                shutil.copyfile(file, target / file.name)

    return write


# -- autoencoder ---------------------------------------------------------------------------------------------------------


def _read_vae(folder: Path) -> WanPart:
    if (folder / "vae").is_dir():
        config = NetworkFolder(folder / "vae", AutoencoderKLWan).config
        stem = "diffusion_pytorch_model.safetensors"
        files = ("config.json", stem, f"{stem}.index.json", "diffusion_pytorch_model-*.safetensors")
        return WanPart(AutoencoderKLWan, config, _copy_files(folder / "vae", files))
    file = folder / VAE_FILE
    state = read_checkpoint(file)
    found = detect_wan_vae(state, file)
    state = rename_wan_vae(state, found["num_res_blocks"])
    network = describe_network(AutoencoderKLWan, found, state, file)
    return WanPart(
        AutoencoderKLWan,
        network.config,
        lambda target: build_network(AutoencoderKLWan, found, state, file).save_pretrained(target),
    )


def detect_wan_vae(state: State, file: Path) -> dict[str, Any]:
    """Infer the arguments of `AutoencoderKLWan` from an original state dict."""

    def shape(name: str, dims: int = 5) -> Any:
        return require_shape(state, name, dims, file, "Wan2.1 autoencoder")

    if any(name.startswith("encoder.downsamples.0.downsamples.") for name in state):
        raise ValueError(f"{file} is {_DIFFUSERS_22}")
    base, channels = shape("encoder.conv1.weight")[0], shape("conv2.weight")[0]
    if channels != _CHANNELS:
        raise ValueError(f"{file} has latents of {channels} channels, expected Wan2.1's {_CHANNELS}")
    levels: list[list[int]] = [[]]
    temporal: list[bool] = []
    for n in range(count_modules(state, "encoder.downsamples.")):
        if f"encoder.downsamples.{n}.residual.2.weight" in state:
            levels[-1].append(shape(f"encoder.downsamples.{n}.residual.2.weight")[0])
        else:
            temporal.append(f"encoder.downsamples.{n}.time_conv.weight" in state)
            levels.append([])
    if not all(levels) or any(level[-1] % base for level in levels):
        raise ValueError(f"{file} is not a Wan2.1 autoencoder: its encoder has widths {levels}")
    return {
        "base_dim": base,
        "z_dim": channels,
        "dim_mult": [level[-1] // base for level in levels],
        "num_res_blocks": len(levels[0]),
        "temperal_downsample": temporal,
        "scale_factor_temporal": 2 ** sum(temporal),
        "scale_factor_spatial": 2 ** len(temporal),
    }


def rename_wan_vae(state: State, num_res_blocks: int) -> State:
    """Return the weights of an original autoencoder under diffusers' names.

    A level of the decoder has one residual block more than of the encoder, then an up-sampler.
    """

    def upsample(match: re.Match[str]) -> str:
        level, place = divmod(int(match[1]), num_res_blocks + 2)
        return f"decoder.up_blocks.{level}." + (f"resnets.{place}." if place <= num_res_blocks else "upsamplers.0.")

    renamed = {}
    for name, value in state.items():
        new = re.sub(r"^decoder\.upsamples\.(\d+)\.", upsample, name)
        for pattern, replacement in _VAE_NAMES:
            new = re.sub(pattern, replacement, new)
        renamed[new] = value
    return renamed


# -- text encoder --------------------------------------------------------------------------------------------------------


def _read_text_encoder(folder: Path) -> WanPart:
    from transformers import UMT5Config, UMT5EncoderModel  # takes seconds to import

    if (folder / "text_encoder").is_dir():
        config = StoredNetwork(folder / "text_encoder", TEXT_ENCODERS["UMT5EncoderModel"]).config.to_dict()
        files = ("config.json", "*.safetensors", "*.safetensors.index.json")
        return WanPart(UMT5EncoderModel, config, _copy_files(folder / "text_encoder", files))
    file = folder / TEXT_FILE
    state = read_checkpoint(file)
    found = detect_text_encoder(state, file)
    state = rename_text_encoder(state, file)

    def build(**arguments: Any) -> Any:
        return UMT5EncoderModel(UMT5Config(**arguments))

    def write(target: Path) -> None:
        network = build_network(build, found, state, file)
        network.tie_weights()  # otherwise both copies of the embeddings would be saved
        network.save_pretrained(target)

    describe_network(build, found, state, file)
    return WanPart(UMT5EncoderModel, found, write)


def detect_text_encoder(state: State, file: Path) -> dict[str, Any]:
    """Infer the arguments of `UMT5Config` from an original state dict; ValueError if it is of another kind of model."""

    def shape(name: str) -> Any:
        return require_shape(state, name, 2, file, "UMT5 encoder of Wan2.1")

    vocab, width = shape("token_embedding.weight")
    buckets, heads = shape("blocks.0.pos_embedding.embedding.weight")
    return {
        "vocab_size": vocab,
        "d_model": width,
        "d_kv": shape("blocks.0.attn.q.weight")[0] // heads,
        "d_ff": shape("blocks.0.ffn.fc1.weight")[0],
        "num_layers": count_modules(state, "blocks."),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu",
    }


def rename_text_encoder(state: State, file: Path) -> State:
    """Return the weights of an original encoder under the names of `UMT5EncoderModel`; ValueError for an unknown name."""
    renamed: State = {}
    for name, value in state.items():
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name)
        if block and block[2] in _TEXT_NAMES:
            renamed[f"encoder.block.{block[1]}.{_TEXT_NAMES[block[2]]}.weight"] = value
        elif name == "token_embedding.weight":
            renamed |= {"shared.weight": value, "encoder.embed_tokens.weight": value}
        elif name == "norm.weight":
            renamed["encoder.final_layer_norm.weight"] = value
        else:
            raise ValueError(f"{file} holds {name}, which is not a parameter of a UMT5 encoder of Wan2.1")
    return renamed


# -- tokenizer -----------------------------------------------------------------------------------------------------------


def _read_tokenizer(folder: Path) -> WanPart:
    import transformers

    place = folder / "tokenizer" if (folder / "tokenizer").is_dir() else folder / TOKENIZER_FOLDER
    validate_tokenizer_files(place, "T5Tokenizer")
    file = place / "tokenizer_config.json"
    found = read_config(file).get("tokenizer_class") if file.is_file() else None
    name = _FAST.get(str(found), str(found or "T5TokenizerFast"))
    if name not in ("T5TokenizerFast", "PreTrainedTokenizerFast"):
        raise ValueError(f"{file} has tokenizer_class: {found!r}, expected that of T5")
    return WanPart(getattr(transformers, name), {}, _copy_files(place, _TOKENIZER_FILES))

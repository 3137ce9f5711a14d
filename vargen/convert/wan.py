"""Files with Wan2.1's layout: of a causal transformer, and of its autoencoder, UMT5 text encoder and tokenizer.

Sizes are inferred from the shapes. A transformer gets its original names, the other parts those of diffusers and
transformers; parts that are in these formats already are copied.

Sources: Wan Team 2025, "Wan" (arXiv:2503.20314); Chung et al. 2023, "UniMax" (arXiv:2304.09151) for UMT5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

from vargen.convert.state_dicts import (
    State,
    build_network,
    count_modules,
    describe_network,
    read_checkpoint,
    require_shape,
)
from vargen.folders.networks import NetworkFolder
from vargen.folders.tokenizers import TokenizerFolder, choose_class
from vargen.folders.transformers_networks import StoredNetwork
from vargen.models.text_encoder import TEXT_ENCODERS
from vargen.models.tokenizers.video_vae import AutoencoderKLWan
from vargen.values import short_repr
from vargen.weight_files import rename

_KIND = "causal video transformer"
HEAD_DIM = 128  # in all official models
_PLACES = ("generator_ema", "generator")  # where training files keep the weights, in order of preference
_CRITIC_HEADS = ("_cls_pred_branch", "_register_tokens", "_gan_ca_blocks")  # of adversarial training
# Names of what other networks with this layout have in addition, and why they cannot be converted.
_EXTRAS = {
    r"\blora_(A|B|down|up)\b": "it is a LoRA: merge it into its base model first",
    r"\bimg_emb\.|\bimage_embedder\.": "it takes an image beside its latents: give a text-to-video model",
    r"^vace_": "it has VACE layers, which take control videos: give a text-to-video model",
    r"\.(scale_weight|weight_scale|scale_input)$": "its weights are quantized: give a file of 16- or 32-bit weights",
}
# Latent channels of Wan's autoencoders -> spatial stride, frames per second, default rows and columns in pixels.
LATENTS = {16: (8, 16, (480, 832)), 48: (16, 24, (704, 1280))}

# Names in diffusers' `WanTransformer3DModel` to original names. The two number the norms differently.
_ORIGINAL_NAMES = (
    (r"^condition_embedder\.(text|time)_embedder\.linear_1\.", r"\1_embedding.0."),
    (r"^condition_embedder\.(text|time)_embedder\.linear_2\.", r"\1_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^proj_out\.", "head.head."),
    (r"^scale_shift_table$", "head.modulation"),
    (r"\.scale_shift_table$", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_(q|k|v)\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.norm2\.", ".norm3."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
)

VAE_FILE, TEXT_FILE, TOKENIZER_FOLDER = "Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth", "google/umt5-xxl"
_VAE_FILE_22 = "Wan2.2_VAE.pth"
# The original file lacks the statistics of its latents.
_DIFFUSERS_22 = "Wan2.2's autoencoder: give Wan2.2-TI2V-5B in diffusers' format"
# Original names of the text encoder to those of `UMT5EncoderModel`.
_TEXT_NAMES = (
    (r"^token_embedding\.", "shared."),
    (r"^blocks\.", "encoder.block."),
    (r"^norm\.", "encoder.final_layer_norm."),
    (r"\.norm1\.", ".layer.0.layer_norm."),
    (r"\.attn\.(q|k|v|o)\.", r".layer.0.SelfAttention.\1."),
    (r"\.pos_embedding\.embedding\.", ".layer.0.SelfAttention.relative_attention_bias."),
    (r"\.norm2\.", ".layer.1.layer_norm."),
    (r"\.ffn\.gate\.0\.", ".layer.1.DenseReluDense.wi_0."),
    (r"\.ffn\.fc1\.", ".layer.1.DenseReluDense.wi_1."),
    (r"\.ffn\.fc2\.", ".layer.1.DenseReluDense.wo."),
)


def to_original_names(state: State, file: Path) -> State:
    """Return the weights under their original names, whichever of the two naming schemes the file uses.

    Prefixes and the heads of adversarial training are removed.
    """
    bare = {re.sub(r"^(model\.)?(diffusion_model\.)?", "", name): value for name, value in state.items()}
    state = {name: value for name, value in bare.items() if not name.startswith(_CRITIC_HEADS)}
    for pattern, reason in _EXTRAS.items():
        if found := next((name for name in state if re.search(pattern, name)), None):
            raise ValueError(f"{file} holds {found}: {reason}")
    if "patch_embedding.weight" not in state:
        raise ValueError(f"{file} is not a {_KIND}: it has no patch_embedding.weight")
    from_diffusers = any(name.startswith("condition_embedder.") for name in state)
    return {rename(name, _ORIGINAL_NAMES if from_diffusers else ()): value for name, value in state.items()}


def read_transformer(files: Sequence[Path], averaged: bool) -> State:
    """Read the weights of a transformer under their original names.

    Args:
        files: parts of one model.
        averaged: whether averaged (EMA) weights are preferred where a file has both.
    """
    state: State = {}
    for file in files:
        part = read_checkpoint(file, _PLACES if averaged else _PLACES[::-1])
        if twice := state.keys() & part.keys():
            raise ValueError(f"{file} holds {min(twice)}, which an earlier file holds, too; give parts of one model")
        state |= part
    return to_original_names(state, files[0])


def detect_transformer(state: State, file: Path, heads: int | None = None, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """Infer the arguments of `CausalVideoTransformer` from a state dict with original names.

    Args:
        heads: number of attention heads. Default: the width divided by `head_dim`.
    """
    shape = partial(require_shape, state, file, _KIND)
    dim, channels, _, _, patch = shape("patch_embedding.weight", 5)
    if channels not in LATENTS:
        expected = f"{' or '.join(map(str, LATENTS))}, as text-to-video models of Wan have"
        raise ValueError(f"{file} has {channels} latent channels, expected {expected}")
    if heads is None and dim % head_dim:
        raise ValueError(f"n_head must be given: a width of {dim} is no multiple of the official heads' {head_dim}")
    stride, fps, _ = LATENTS[channels]
    return {
        "dim": dim,
        "ffn_dim": shape("blocks.0.ffn.0.weight")[0],
        "num_heads": heads or dim // head_dim,
        "num_layers": count_modules(state, "blocks."),
        "channels": channels,
        "patch": patch,
        "spatial_stride": stride,
        "fps": fps,
        "text_dim": shape("text_embedding.0.weight")[1],
        "freq_dim": shape("time_embedding.0.weight")[1],
    }


def resolve_latent_size(size: tuple[int, int] | None, channels: int, patch: int) -> dict[str, int]:
    """Return `height` and `width` of latents for frames of `size` pixels (rows, columns); None: the official size."""
    stride, _, official = LATENTS[channels]
    rows, columns = official if size is None else size
    if any(side < stride * patch or side % (stride * patch) for side in (rows, columns)):
        raise ValueError(f"size must be multiples of {stride * patch} pixels, got {short_repr(f'{rows}x{columns}')}")
    return {"height": rows // stride, "width": columns // stride}


class WanPart(NamedTuple):
    """A component that was validated by names and shapes and is not read yet; `write` writes its folder."""

    kind: type
    config: Any
    write: Callable[[Path], Any]


def read_wan_parts(folder: Path) -> dict[str, WanPart]:
    """Return `vae`, `text_encoder` and `tokenizer` of a folder of Wan2.1, or of Wan2.2 in diffusers' format."""
    if (folder / _VAE_FILE_22).exists() and not (folder / "vae").is_dir():
        raise ValueError(f"wan {str(folder)!r} holds {_VAE_FILE_22}, {_DIFFUSERS_22}")
    readers = (
        ("vae", VAE_FILE, _read_vae),
        ("text_encoder", TEXT_FILE, _read_text_encoder),
        ("tokenizer", TOKENIZER_FOLDER, _read_tokenizer),
    )
    parts = {}
    for name, original, read in readers:
        place = folder / name if (folder / name).is_dir() else folder / original
        if not place.exists():
            raise ValueError(
                f"wan {str(folder)!r} must hold Wan2.1, original or in diffusers' format; it has no {original} or {name}/"
            )
        parts[name] = read(place)
    return parts


def _read_vae(place: Path) -> WanPart:
    if place.is_dir():
        return WanPart(AutoencoderKLWan, NetworkFolder(place, AutoencoderKLWan).config, partial(copytree, place))
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers  # takes seconds to import

    state = read_checkpoint(place)
    found = detect_wan_vae(state, place)
    return _convert_part(AutoencoderKLWan, AutoencoderKLWan, found, convert_wan_vae_to_diffusers(state), place)


def _convert_part(kind: type, build: Callable[..., Any], config: dict[str, Any], state: State, place: Path) -> WanPart:
    """Return a part that is written in the format of its class."""

    def write(target: Path) -> None:
        network = build_network(build, config, state, place)
        if hasattr(network, "tie_weights"):  # otherwise both copies of tied embeddings would be saved
            network.tie_weights()
        network.save_pretrained(target)

    return WanPart(kind, describe_network(build, config, state, place).config, write)


def detect_wan_vae(state: State, file: Path) -> dict[str, Any]:
    """Infer the widths of `AutoencoderKLWan` from an original state dict."""
    if any(name.startswith("encoder.downsamples.0.downsamples.") for name in state):
        raise ValueError(f"{file} is {_DIFFUSERS_22}")
    shape = partial(require_shape, state, file, "Wan2.1 autoencoder", dims=5)
    base = shape("encoder.conv1.weight")[0]
    widths = [shape(f"encoder.downsamples.{place}.residual.2.weight")[0] for place in (0, 3, 6, 9)]
    return {"base_dim": base, "dim_mult": [width // base for width in widths]}


def _read_text_encoder(place: Path) -> WanPart:
    from transformers import UMT5Config, UMT5EncoderModel  # takes seconds to import

    if place.is_dir():
        config = StoredNetwork(place, TEXT_ENCODERS["UMT5EncoderModel"]).config
        return WanPart(UMT5EncoderModel, config, partial(copytree, place))
    state = read_checkpoint(place)
    found = _detect_text_encoder(state, place)
    state = {rename(name, _TEXT_NAMES): value for name, value in state.items()}
    state["encoder.embed_tokens.weight"] = state["shared.weight"]

    def build(**arguments: Any) -> Any:
        return UMT5EncoderModel(UMT5Config(**arguments))

    return _convert_part(UMT5EncoderModel, build, found, state, place)


def _detect_text_encoder(state: State, file: Path) -> dict[str, Any]:
    """Infer the arguments of `UMT5Config` from an original state dict."""
    shape = partial(require_shape, state, file, "UMT5 encoder of Wan2.1")
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


def _read_tokenizer(place: Path) -> WanPart:
    import transformers

    found = TokenizerFolder(place, choose_class(place, "T5TokenizerFast", "PreTrainedTokenizerFast"))
    return WanPart(getattr(transformers, found.class_name), {}, partial(copytree, place))

"""Files with the layout of Wan2.1 (Wan Team 2025, arXiv:2503.20314): of a causal transformer, which gets its original names and
whose sizes are inferred from the shapes, and of its autoencoder, text encoder and tokenizer in diffusers' format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vargen.convert.state_dicts import State, count_modules, read_checkpoint, require_shape
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


def to_original_names(state: State, file: Path) -> State:
    """Return the weights under their original names, of either naming scheme, without adversarial heads."""
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
    """Read the weights of a transformer from its parts, averaged (EMA) ones if preferred."""
    state: State = {}
    for file in files:
        part = read_checkpoint(file, _PLACES if averaged else _PLACES[::-1])
        if twice := state.keys() & part.keys():
            raise ValueError(f"{file} holds {min(twice)}, which an earlier file holds, too; give parts of one model")
        state |= part
    return to_original_names(state, files[0])


def detect_transformer(state: State, file: Path, heads: int | None = None, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """Infer the arguments of `CausalVideoTransformer`; `heads`: by default the width over `head_dim`."""
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


def read_wan_parts(folder: Path) -> dict[str, Any]:
    """Return `vae`, `text_encoder` and `tokenizer` of a folder of Wan, by their headers."""
    for name in ("vae", "text_encoder", "tokenizer"):
        if not (folder / name).is_dir():
            wanted = "a folder of Wan in diffusers' format, such as Wan2.1-T2V-1.3B-Diffusers"
            raise ValueError(f"wan {str(folder)!r} must be {wanted}; it has no {name}/")
    words = folder / "tokenizer"
    return {
        "vae": NetworkFolder(folder / "vae", AutoencoderKLWan),
        "text_encoder": StoredNetwork(folder / "text_encoder", TEXT_ENCODERS["UMT5EncoderModel"]),
        "tokenizer": TokenizerFolder(words, choose_class(words, "T5TokenizerFast", "PreTrainedTokenizerFast")),
    }

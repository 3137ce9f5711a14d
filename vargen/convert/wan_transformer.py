"""Causal video transformers with Wan2.1's layout: names of their weights, and their configuration from the shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vargen.convert.state_dicts import State, count_modules, read_checkpoint, require_shape, validate_input_files
from vargen.convert.video_checkpoints import validate_checkpoint_file
from vargen.values import short_repr

_KIND = "causal video transformer"
HEAD_DIM = 128  # in all official models
_PLACES = ("generator_ema", "generator")  # where training files keep the weights, in order of preference
# Classes in configurations beside the weights: of the original model, and of the folder of diffusers' format.
_NOT_CAUSAL = ("WanModel", "WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline")
_PREFIXES = ("model.", "diffusion_model.")
_CRITIC_HEADS = ("_cls_pred_branch", "_register_tokens", "_gan_ca_blocks")  # of adversarial training, beside the network
# Names of what other networks with this layout have in addition, and why they cannot be converted.
_EXTRAS = {
    r"\blora_(A|B|down|up)\b": "it is a LoRA: merge it into its base model first",
    r"\bimg_emb\.|\bimage_embedder\.": "it takes an image beside its latents: give a text-to-video model",
    r"^vace_": "it has VACE layers, which take control videos: give a text-to-video model",
    r"\.(scale_weight|weight_scale|scale_input)$": "its weights are quantized: give a file of 16- or 32-bit weights",
}
# Latent channels of Wan's autoencoders -> spatial stride, frames per second, default rows and columns in pixels.
LATENTS = {16: (8, 16, (480, 832)), 48: (16, 24, (704, 1280))}

# Original names to diffusers names. The two number the norms differently: `norm3` in the former is `norm2` in the latter.
_OUTER = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
_INNER = {
    "modulation": "scale_shift_table",
    **{f"self_attn.{a}": f"attn1.{b}" for a, b in _ATTENTION.items()},
    **{f"cross_attn.{a}": f"attn2.{b}" for a, b in _ATTENTION.items()},
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
_BARE = ("modulation", "scale_shift_table")  # parameters that are not in a submodule
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def _map_name(name: str, outer: dict[str, str], inner: dict[str, str]) -> str:
    block = _BLOCK.fullmatch(name)
    table, prefix, rest = (inner, f"blocks.{block[1]}.", block[2]) if block else (outer, "", name)
    if rest in table and rest.endswith(_BARE):
        return prefix + table[rest]
    module, _, parameter = rest.rpartition(".")
    if module not in table or module.endswith(_BARE):
        raise ValueError(f"{name!r} is not a parameter of a {_KIND}")
    return f"{prefix}{table[module]}.{parameter}"


def to_diffusers(name: str) -> str:
    """Return a parameter's name in `WanTransformer3DModel`; ValueError for a name that official models do not have."""
    return _map_name(name, _OUTER, _INNER)


def to_original(name: str) -> str:
    """Inverse of `to_diffusers`."""
    return _map_name(name, {b: a for a, b in _OUTER.items()}, {b: a for a, b in _INNER.items()})


def to_original_names(state: State, file: str) -> State:
    """Return the weights under their original names, whichever of the two naming schemes the file uses.

    Prefixes and the heads of adversarial training are removed.
    """
    state = {name: value for name, value in state.items() if not name.startswith(_CRITIC_HEADS)}
    while state and any(all(name.startswith(prefix) for name in state) for prefix in _PREFIXES):
        state = {name.partition(".")[2]: value for name, value in state.items()}
    state = {name: value for name, value in state.items() if not name.startswith(_CRITIC_HEADS)}
    for pattern, reason in _EXTRAS.items():
        if found := next((name for name in state if re.search(pattern, name)), None):
            raise ValueError(f"{file} holds {found}: {reason}")
    if "patch_embedding.weight" not in state:
        raise ValueError(f"{file} is not a {_KIND}: it has no patch_embedding.weight")
    if not any(name.startswith("condition_embedder.") for name in state):
        return state
    try:
        return {to_original(name): value for name, value in state.items()}
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def read_transformer(files: Sequence[Path], name: str, averaged: bool = True) -> State:
    """Read the weights of a transformer under their original names.

    Args:
        files: parts of one model.
        name: name of the argument in error messages.
        averaged: whether averaged (EMA) weights are preferred where a file has both.
    """
    if not files:
        raise ValueError(f"{name} must be one file or more, got none")
    for file in files:
        validate_input_files(**{name: file})
        _refuse_other_algorithms(file)
    state: State = {}
    for file in files:
        part = read_checkpoint(file, _PLACES if averaged else _PLACES[::-1])
        if twice := state.keys() & part.keys():
            raise ValueError(f"{file} holds {min(twice)}, which an earlier file holds, too; give parts of one model")
        state |= part
    return to_original_names(state, str(files[0]))


def _refuse_other_algorithms(file: Path) -> None:
    """Raise ValueError for files whose tensors are those of this layout, but which run another algorithm."""
    validate_checkpoint_file(file)
    named = "/".join(file.absolute().parts[-2:]).lower()
    if (file.parent.parent / "transformer_2").is_dir() or "high_noise" in named or "low_noise" in named:
        reason = "two experts, one for high and one for low noise levels, and vargen runs one network"
        raise ValueError(f"{file} belongs to a model of {reason}")
    if not file.name.startswith("diffusion_pytorch_model"):
        return
    for place in (file.parent / "config.json", file.parent.parent / "model_index.json"):
        kind = _read_class_name(place)
        if kind in _NOT_CAUSAL:
            raise ValueError(f"{file} is Wan's own model, which is not causal: give a model distilled from it")
        if kind.startswith("AnyFlow"):
            raise ValueError(f"{file} is AnyFlow: it predicts averages over intervals of time, and vargen velocities")


def _read_class_name(file: Path) -> str:
    """Return the class that a configuration names; empty without one."""
    try:
        return str(json.loads(file.read_text("utf-8")).get("_class_name", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def detect_transformer(state: State, file: Path, heads: int | None = None, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """Infer the arguments of `CausalVideoTransformer` from a state dict with original names.

    Args:
        heads: number of attention heads. Default: the width divided by `head_dim`.
    """

    def shape(name: str, dims: int = 2) -> Any:
        return require_shape(state, name, dims, file, _KIND)

    dim, channels, depth, patch, other = shape("patch_embedding.weight", 5)
    if depth != 1 or patch != other:
        raise ValueError(f"{file} has patches of {depth}x{patch}x{other}, expected one frame and a square")
    if shape("head.head.weight")[0] != channels * patch * patch:
        raise ValueError(f"{file} takes an image beside its latents, which is not supported: give a text-to-video model")
    if channels not in LATENTS:
        raise ValueError(f"{file} has {channels} latent channels, expected {' or '.join(map(str, LATENTS))}, as Wan has")
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
    """Return `height` and `width` of latents for frames of `size` pixels (rows, columns); None for the official size."""
    stride, _, official = LATENTS[channels]
    rows, columns = official if size is None else size
    if any(side < stride * patch or side % (stride * patch) for side in (rows, columns)):
        raise ValueError(f"size must be multiples of {stride * patch} pixels, got {short_repr(f'{rows}x{columns}')}")
    return {"height": rows // stride, "width": columns // stride}

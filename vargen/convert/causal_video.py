"""Conversion of causal video transformers with Wan2.1's layout, under original or diffusers names, to a folder for vargen.

Self-Forcing, CausVid, Causal-Forcing and Krea's model have this layout. EMA weights are used if a file has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vargen.convert.state_dicts import (
    State,
    build_network,
    count_modules,
    read_checkpoint,
    require_shape,
    validate_dtype,
    validate_input_files,
)
from vargen.files import atomic_folder
from vargen.model_files import write_model_index
from vargen.models.causal_video import CausalVideoTransformer

_KIND = "causal video transformer"
_HEAD_DIM = 128  # in all official models
_AVERAGED = "generator_ema"

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

    Raises:
        ValueError: naming the file, for a name of neither scheme.
    """
    prefixes = ("model.", "_fsdp_wrapped_module.")
    while state and any(all(name.startswith(prefix) for name in state) for prefix in prefixes):
        state = {name.partition(".")[2]: value for name, value in state.items()}
    if "patch_embedding.weight" not in state:
        raise ValueError(f"{file} is not a {_KIND}: it has no patch_embedding.weight")
    if not any(name.startswith("condition_embedder.") for name in state):
        return state
    try:
        return {to_original(name): value for name, value in state.items()}
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def detect_transformer(state: State, file: Path, heads: int | None = None) -> dict[str, Any]:
    """Infer the arguments of `CausalVideoTransformer` from a state dict with original names.

    Raises:
        ValueError: the state dict is of another kind of model, or the number of heads cannot be inferred.
    """

    def shape(name: str, dims: int = 2) -> torch.Size:
        return require_shape(state, name, dims, file, _KIND)

    dim, channels, depth, patch, other = shape("patch_embedding.weight", 5)
    if depth != 1 or patch != other:
        raise ValueError(f"{file} has patches of {depth}x{patch}x{other}, expected one frame and a square")
    if "img_emb.proj.0.weight" in state or shape("head.head.weight")[0] != channels * patch * patch:
        raise ValueError(f"{file} takes an image beside its latents, which is not supported: give a text-to-video model")
    if heads is None and dim % _HEAD_DIM:
        raise ValueError(f"n_head must be given: a width of {dim} is no multiple of the official heads' {_HEAD_DIM}")
    return {
        "dim": dim,
        "ffn_dim": shape("blocks.0.ffn.0.weight")[0],
        "num_heads": heads or dim // _HEAD_DIM,
        "num_layers": count_modules(state, "blocks."),
        "channels": channels,
        "patch": patch,
        "text_dim": shape("text_embedding.0.weight")[1],
        "freq_dim": shape("time_embedding.0.weight")[1],
    }


def convert_causal_video(
    transformer: Sequence[Path],
    output: Path,
    *,
    n_head: int | None = None,
    size: tuple[int, int] = (480, 832),
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Path:
    """Convert a causal video transformer in Wan2.1's layout, such as Self-Forcing's, to a folder with `transformer/`.

    Args:
        transformer: `.pt`, `.pth`, `.bin` or `.safetensors` files; several files are parts of one model.
        output: folder to create. It appears whole or not at all.
        n_head: number of attention heads, for a width that is not a multiple of 128.
        size: rows and columns of the videos, in pixels.
        dtype: storage dtype of the weights; by default that of the file.
        overwrite: replace `output` if it is a model folder.

    Raises:
        FileExistsError, OSError: `output` cannot be written; raised before anything is read.
        FileNotFoundError: an input is missing.
        ValueError: a file is damaged, holds more than tensors, is of another kind of model, lacks a tensor, or has one
            of a wrong shape.
    """
    validate_dtype(dtype)
    if not transformer:
        raise ValueError("transformer must be one file or more, got none")
    if any(side < 16 or side % 16 for side in size):
        raise ValueError(f"size must be multiples of 16 pixels, got {size[0]}x{size[1]}")
    with atomic_folder(output, list(transformer), overwrite) as folder:
        state: State = {}
        for file in transformer:
            validate_input_files(transformer=file)
            part = read_checkpoint(file, prefer=_AVERAGED)
            if twice := state.keys() & part.keys():
                raise ValueError(f"{file} holds {min(twice)}, which an earlier file holds, too; give parts of one model")
            state |= part
        first = transformer[0]
        state = to_original_names(state, str(first))
        config = detect_transformer(state, first, n_head)
        config |= {"height": size[0] // 8, "width": size[1] // 8}
        network = build_network(CausalVideoTransformer, config, state, first, dtype)
        network.save_pretrained(folder / "transformer")
        write_model_index(folder, "CausalVideoPipeline", {"transformer": network})
    return output

"""Conversion of TA-Tok, Tar's tokenizer: its decoder, without the encoder of images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vargen.convert.state_dicts import build_network, count_modules, read_checkpoint, read_file, require_shape
from vargen.models.tokenizers.ta_tok import TATokDecoder

_QUANTIZER, _BODY = "bottleneck.regularizer", "decoder.vision_model"
_LAYERS = f"{_BODY}.encoder.layers"
_LAYER_NAMES = {
    "layer_norm1": "norm1", "layer_norm2": "norm2", "mlp.fc1": "linear1", "mlp.fc2": "linear2",
    "self_attn.out_proj": "self_attn.out_proj",
}  # fmt: skip
_ARGUMENTS = ("model", "args", "bottleneck", "args", "regularizer", "args")  # keys of the quantizer's in a file


def convert_ta_tok(file: Path) -> TATokDecoder:
    """Build the decoder of an official file (`ta_tok.pth`), in float32.

    Its codes only pass through linear layers and a normalization before the first layer, so that one table is made of them.
    """
    state = read_checkpoint(file)
    shape = partial(require_shape, state, file, "TA-Tok")

    def project(table: torch.Tensor, name: str) -> torch.Tensor:
        if shape(f"{name}.weight")[1] != table.shape[1]:
            raise ValueError(f"{file} is not a TA-Tok: its {name} does not take {table.shape[1]} numbers")
        return F.linear(table, state[f"{name}.weight"].float(), state[f"{name}.bias"].float())

    shape(f"{_QUANTIZER}.embedding.weight")
    table = project(state[f"{_QUANTIZER}.embedding.weight"].float(), f"{_QUANTIZER}.embedding_proj")
    if _is_normalized(file):
        table = F.normalize(table, dim=-1)
    table = project(project(table, "bottleneck.out_linear"), f"{_BODY}.embeddings.patch_embedding")
    count, dim = shape(f"{_BODY}.embeddings.position_embedding.weight")
    side = math.isqrt(count)
    if side**2 != count:
        raise ValueError(f"{file} is not a TA-Tok: its {count} positions are no square")
    places = state[f"{_BODY}.embeddings.position_embedding.weight"].T.reshape(dim, side, side)
    found, depth = {"codes.weight": table, "positions": places}, count_modules(state, f"{_LAYERS}.")
    hidden = shape(f"{_LAYERS}.0.mlp.fc1.weight")[0]
    try:
        for kind in ("weight", "bias"):
            for number in range(depth):
                own, ours = f"{_LAYERS}.{number}", f"encoder.layers.{number}"
                parts = [state[f"{own}.self_attn.{each}_proj.{kind}"] for each in "qkv"]
                found[f"{ours}.self_attn.in_proj_{kind}"] = torch.cat(parts)
                found |= {f"{ours}.{new}.{kind}": state[f"{own}.{old}.{kind}"] for old, new in _LAYER_NAMES.items()}
            found[f"encoder.norm.{kind}"] = state[f"{_BODY}.post_layernorm.{kind}"]
            found |= {f"head.{each}.{kind}": state[f"decode_task_layer.{each}.{kind}"] for each in (0, 2)}
    except KeyError as error:
        raise ValueError(f"{file} is not a TA-Tok: it has no {error.args[0]}") from error
    config = {"codebook_size": len(table), "dim": dim, "n_layer": depth, "hidden": hidden, "side": side}
    return build_network(TATokDecoder, config, {name: each.float() for name, each in found.items()}, file)


def _is_normalized(file: Path) -> bool:
    """Whether the arguments in a file say that codes are normalized."""
    found: Any = read_file(file)
    for key in _ARGUMENTS:
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(value := found.get("l2_normalized", False), bool):
        raise ValueError(f"{file} does not say whether its codes are normalized, under {'.'.join(_ARGUMENTS)}.l2_normalized")
    return value

"""Conversion of official VAR or CoDe files, whose sizes are inferred from shapes."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vargen.convert.state_dicts import (
    State,
    build_network,
    count_modules,
    read_checkpoint,
    require_equal,
    require_inputs,
    require_shape,
    write_image_model,
)
from vargen.files import atomic_folder
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var.network import SCALES, VARTransformer, is_derived_buffer

# Sampling settings of the official demo. Its "cfg" of 4 weights the added difference, so the guidance scale is 5 here.
DEFAULTS: dict[str, Any] = {"guidance_scale": 5.0, "temperature": 1.0, "top_k": 900, "top_p": 0.95}


def convert_var(
    transformer: Path,
    vae: Path,
    output: Path,
    *,
    id2label: Path | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Convert official VAR or CoDe files, or the index of their parts, to a pipeline folder.

    Args:
        transformer: a VAR transformer, or a drafter or refiner of CoDe: `.pt`, `.pth`, `.bin`, `.ckpt`, `.safetensors` or an
            index of such parts.
        vae: the image tokenizer, which all of them share.
        output: folder to create. It appears whole or not at all.
        id2label: JSON file of class names, `{"0": "name, synonym"}` or a list of names.
        dtype: storage dtype of the transformer; by default that of the file.
    """
    with atomic_folder(output) as folder:
        require_inputs(transformer=transformer, vae=vae, id2label=id2label)
        network, codes = read_checkpoint(transformer, prefer="var_wo_ddp"), read_checkpoint(vae, prefer="vae_local")
        config = detect_transformer(network, transformer)
        vae_config = detect_vae(codes, vae, config["scales"])
        require_equal(
            f"{transformer} and {vae}",
            ("codes", config["vocab_size"], vae_config["codebook_size"]),
            ("columns of codes", config["code_dim"], vae_config["codebook_embed_dim"]),
        )
        parts = {
            "vqvae": build_network(MultiScaleVQModel, vae_config, codes, vae),
            "transformer": build_network(VARTransformer, config, network, transformer, dtype),
        }
        write_image_model(folder, "VARPipeline", parts, DEFAULTS, id2label)
    return output


def detect_transformer(state: State, file: Path) -> dict[str, Any]:
    """Infer the arguments of `VARTransformer` from a state dict; removes its buffers, which are recomputed."""
    shape = partial(require_shape, state, file, "VAR transformer")
    positions, dim = shape("pos_1LC", 3)[1:]
    blocks = count_modules(state, "blocks.")
    normed = "blocks.0.attn.scale_mul_1H11" in state
    heads = shape("blocks.0.attn.scale_mul_1H11", 4)[1] if normed else blocks  # official rule: heads = blocks
    scales = detect_scales(state, positions, file)
    config = {
        "condition": "class",
        "scales": scales,
        "depth": blocks,
        "dim": dim,
        "n_head": heads,
        "vocab_size": shape("head.weight")[0],
        "code_dim": shape("word_embed.weight")[1],
        "num_classes": shape("class_emb.weight")[0] - 1,  # the last row is the null class
        "mlp_ratio": shape("blocks.0.ffn.fc1.weight")[0] / dim,
        "shared_aln": "shared_ada_lin.1.weight" in state,
        "attn_l2_norm": normed,
    }
    for name in [name for name in state if is_derived_buffer(name)]:
        del state[name]
    return config


def detect_scales(state: State, positions: int, file: Path) -> tuple[int, ...]:
    """Return the scales by the level of each position in the file, else by the official number of positions."""
    if "lvl_1L" in state:
        sides = [math.isqrt(count) for count in torch.bincount(state["lvl_1L"].flatten().long()).tolist()]
        if sum(side * side for side in sides) != positions or state["lvl_1L"].numel() != positions:
            raise ValueError(f"{file} is damaged: its lvl_1L does not describe {positions} positions in square scales")
        return tuple(sides)
    known = {sum(side * side for side in table): (pixels, table) for pixels, table in SCALES.items()}
    if positions not in known:
        allowed = ", ".join(f"{count} ({pixels} pixels)" for count, (pixels, _) in known.items())
        found = f"it has {positions} positions, and official tables have {allowed}"
        raise ValueError(f"the scales of {file} are unknown: {found}; its lvl_1L, which would tell, is missing")
    return known[positions][1]


def detect_vae(state: State, file: Path, scales: tuple[int, ...]) -> dict[str, Any]:
    """Infer the arguments of `MultiScaleVQModel`; replaces a usage counter of other scales."""
    shape = partial(require_shape, state, file, "VAR image tokenizer", dims=4)
    ch = shape("encoder.conv_in.weight")[0]
    codes, width = shape("quantize.embedding.weight", dims=2)
    levels = range(max(1, count_modules(state, "encoder.down.")))
    usage = "quantize.ema_vocab_hit_SV"
    if usage not in state or tuple(state[usage].shape) != (len(scales), codes):
        state[usage] = torch.zeros(len(scales), codes)
    return {
        "architecture": "convolutional",
        "codebook_size": codes,
        "codebook_embed_dim": width,
        "ch": ch,
        "ch_mult": [shape(f"encoder.down.{i}.block.0.conv1.weight")[0] // ch for i in levels],
        "num_res_blocks": count_modules(state, "encoder.down.0.block."),
        "scales": scales,
        "shared_phi": count_modules(state, "quantize.quant_resi.qresi_ls."),
    }

"""Conversion of official Infinity files, a transformer and its image tokenizer, to a folder for `InfinityPipeline`.

Sizes are inferred from the shapes. Official loaders leave tensors that a file lacks at random, and ignore those that they do
not know; here both are errors.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vargen.convert.llamagen import read_text_encoder
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
from vargen.models.infinity.network import InfinityTransformer
from vargen.models.infinity.schedules import NUM_SCALES
from vargen.models.tokenizers.bsq import BSQModel
from vargen.values import short_repr

# Sampling settings of the official demos: of 2B, and of 8B, whose tokens are 2 x 2 positions.
DEFAULTS: dict[bool, dict[str, Any]] = {
    False: {"guidance_scale": 4.0, "temperature": 0.5, "top_p": 0.97},
    True: {"guidance_scale": 3.0, "temperature": 1.0, "top_p": 0.97},
}
_BUFFERS = re.compile(
    r".*\.zero_k_bias|lvl_1L|attn_bias_for_masking|Infinity_(in)?visible_(kv|q)len|(quantizer?\.)+lfq\.mask"
)  # which are computed, or not used to generate
_PLACES = ("gpt_fsdp", "vae")  # where training programs keep weights
_CHUNK = re.compile(r"block_chunks\.(\d+)\.module\.(\d+)\.(.*)")
_WRAPPED = re.compile(r"(.*)\.(?:conv|norm)\.(weight|bias)")


def convert_infinity(
    transformer: Path,
    vae: Path,
    output: Path,
    *,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
    pn: str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Convert official Infinity files to a pipeline folder.

    Args:
        transformer: a transformer, such as `infinity_2b_reg.pth`, a training checkpoint, or the folder or index of the parts of
            8B: `.pt`, `.pth`, `.bin`, `.ckpt`, `.safetensors`.
        vae: its image tokenizer, such as `infinity_vae_d32reg.pth`.
        output: folder to create. It appears whole or not at all.
        text_encoder: folder of a T5 encoder (official: flan-t5-xl). Without one, the pipeline takes `prompt_embeds` instead of
            a prompt.
        tokenizer: folder of its tokenizer; default: the text encoder's folder.
        pn: usual number of pixels of the images: 0.06M, 0.25M, 0.60M or 1M. Default: 0.25M if the transformer's name says 512,
            else 1M.
        dtype: storage dtype of the transformer and the text encoder; by default those of the files.
    """
    if tokenizer is not None and text_encoder is None:
        raise ValueError("tokenizer comes with a text_encoder; give both, or neither and use prompt_embeds")
    if pn is not None and pn not in NUM_SCALES:
        raise ValueError(f"pn must be {', '.join(NUM_SCALES)}, got {short_repr(pn)}")
    pn = pn or ("0.25M" if "512" in transformer.name else "1M")
    transformer = _find_index(transformer)
    with atomic_folder(output) as folder:
        require_inputs(transformer=transformer, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer)
        network = rename_transformer(read_checkpoint(transformer, prefer=_PLACES))
        codes = rename_tokenizer(read_checkpoint(vae, prefer=_PLACES[::-1]))
        config, vae_config = detect_transformer(network, transformer), detect_tokenizer(codes, vae)
        bits, d = config["code_dim"], vae_config["bits"]
        vae_config["patchify"] = bits == 4 * d
        require_equal(f"{transformer} and {vae}", ("bits", bits, 4 * d if vae_config["patchify"] else d))
        config["num_scales"] = NUM_SCALES[pn]
        parts: dict[str, Any] = {}
        if text_encoder is not None:
            parts |= read_text_encoder(text_encoder, tokenizer or text_encoder, config["caption_dim"], dtype)
        parts["vqvae"] = build_network(BSQModel, vae_config, codes, vae)
        parts["transformer"] = build_network(InfinityTransformer, config, network, transformer, dtype)
        write_image_model(folder, "InfinityPipeline", parts, DEFAULTS[vae_config["patchify"]], None)
    return output


def _find_index(transformer: Path) -> Path:
    """Return the index in a folder of parts; a file as it is."""
    found = sorted(transformer.glob("*.index.json")) if transformer.is_dir() else [transformer]
    if len(found) != 1:
        raise ValueError(f"transformer must be a file, or a folder with one .index.json, got {str(transformer)!r}")
    return found[0]


def rename_transformer(state: State) -> State:
    """Return the tensors of a transformer under the names here, without buffers, and scales of heads as `[1, H, 1, 1]`."""
    kept = {name: value for name, value in state.items() if not _BUFFERS.fullmatch(name)}
    chunked = [match for name in kept if (match := _CHUNK.fullmatch(name))]
    blocks = sorted({(int(match[1]), int(match[2])) for match in chunked})
    place = {block: number for number, block in enumerate(blocks)}
    found: State = {}
    for name, value in kept.items():
        if match := _CHUNK.fullmatch(name):
            name = f"blocks.{place[int(match[1]), int(match[2])]}.{match[3]}"
        is_swapped = name.endswith(".scale_mul_1H11") and value.dim() == 4  # as [1, 1, H, 1], of another attention
        found[name] = value.reshape(1, -1, 1, 1) if is_swapped else value
    return found


def rename_tokenizer(state: State) -> State:
    """Return the tensors of an image tokenizer under the names here: without a wrapper of each layer, and without buffers."""
    kept = {name: value for name, value in state.items() if not _BUFFERS.fullmatch(name)}
    if "encoder.conv_in.conv.weight" not in kept:
        return kept
    return {f"{match[1]}.{match[2]}" if (match := _WRAPPED.fullmatch(name)) else name: value for name, value in kept.items()}


def detect_transformer(state: State, file: Path) -> dict[str, Any]:
    """Infer the arguments of `InfinityTransformer`, but for the number of scales, from a renamed state dict."""
    shape = partial(require_shape, state, file, "transformer of Infinity")
    rows, width = shape("cfg_uncond")
    return {
        "depth": count_modules(state, "blocks."),
        "dim": shape("pos_start", 3)[2],
        "n_head": shape("blocks.0.sa.scale_mul_1H11", 4)[1],
        "code_dim": shape("word_embed.weight")[1],
        "caption_dim": width,
        "caption_rows": rows,
    }


def detect_tokenizer(state: State, file: Path) -> dict[str, Any]:
    """Infer the arguments of `BSQModel`, but for `patchify`, from a renamed state dict."""
    shape = partial(require_shape, state, file, "tokenizer of Infinity", dims=4)
    ch = shape("encoder.conv_in.weight")[0]

    def width_multipliers(levels: str) -> list[int]:
        count = range(max(1, count_modules(state, f"{levels}.")))
        return [shape(f"{levels}.{i}.block.0.conv1.weight")[0] // ch for i in count]

    return {
        "bits": shape("encoder.conv_out.weight")[0],
        "ch": ch,
        "encoder_ch_mult": width_multipliers("encoder.down"),
        "decoder_ch_mult": width_multipliers("decoder.up"),
        "num_res_blocks": count_modules(state, "encoder.down.0.block."),
    }

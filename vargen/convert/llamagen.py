"""Conversion of official LlamaGen files, a transformer and its image tokenizer, to a folder for `LlamaGenPipeline`.

The files do not describe their networks: sizes are inferred from the shapes, and what shapes do not determine (heads,
grid) comes from the official table, the file name or the caller.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from vargen.convert.state_dicts import (
    State,
    build_network,
    count_modules,
    read_checkpoint,
    refuse_swapped_files,
    require_shape,
    validate_dtype,
    validate_input_files,
    write_image_model,
)
from vargen.files import atomic_folder
from vargen.folders.tokenizers import choose_class, load_tokenizer
from vargen.folders.transformers_networks import StoredNetwork
from vargen.models.llamagen.network import SIZES, LlamaGenTransformer
from vargen.models.text_encoder import TEXT_ENCODERS
from vargen.models.tokenizers.vq import CODEBOOK_USED_SLOTS, VQModel

# (width, layers) -> heads: the released sizes, then 1B, XXXL and 7B, whose weights were not released.
HEADS = {(size["dim"], size["n_layer"]): size["n_head"] for size in SIZES.values()}
HEADS |= {(2048, 22): 32, (2560, 48): 40, (4096, 32): 32}
# Sampling settings of the official demos.
DEFAULTS: dict[str, dict[str, Any]] = {
    "class": {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 2000, "top_p": 1.0},
    "text": {"guidance_scale": 7.5, "temperature": 1.0, "top_k": 1000, "top_p": 1.0},
}


def convert_llamagen(
    transformer: Path,
    vq: Path,
    output: Path,
    *,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
    id2label: Path | None = None,
    dtype: torch.dtype | None = None,
    n_head: int | None = None,
    grid_size: int | None = None,
) -> Path:
    """Convert official LlamaGen files, `.pt`, `.pth`, `.bin`, `.ckpt`, `.safetensors` or an index of such parts, to a pipeline
    folder; returns `output`.

    Args:
        transformer: class- or text-conditional GPT.
        vq: its image tokenizer (VQ-16, VQ-8 or similar); EMA weights if the file has them. Its dtype is kept.
        output: folder to create. It appears whole or not at all.
        text_encoder: folder of a T5 encoder (official: flan-t5-xl), for text models. Without one, the pipeline
            takes `prompt_embeds` instead of a prompt.
        tokenizer: folder of its tokenizer; default: the text encoder's folder.
        id2label: JSON file of class names, `{"0": "name, synonym"}` or a list of names, for class models.
        dtype: storage dtype of the transformer and the text encoder; by default those of the files.
        n_head: number of attention heads, for a width and depth outside the official table.
        grid_size: side of the token grid, if neither the file nor its name (256, 384 or 512 pixels) determines it.

    Raises:
        FileExistsError, OSError: `output` is not empty, or cannot be written; raised before anything is read.
        FileNotFoundError: an input is missing.
        ValueError: a file is damaged, holds more than tensors, is not of the kind that its argument takes, lacks a
            tensor or has one of the wrong shape; the files do not match each other; heads or grid cannot be inferred.
    """
    validate_dtype(dtype)
    if tokenizer is not None and text_encoder is None:
        raise ValueError("tokenizer comes with a text_encoder; give both, or neither and use prompt_embeds")
    transformer, vq, output = Path(transformer), Path(vq), Path(output)
    with atomic_folder(output) as folder:
        validate_input_files(transformer=transformer, vq=vq, id2label=id2label and Path(id2label))
        validate_input_files(text_encoder=text_encoder and Path(text_encoder), tokenizer=tokenizer and Path(tokenizer))
        gpt, codes = read_checkpoint(transformer), read_checkpoint(vq, prefer="ema")
        refuse_swapped_files(gpt, transformer, codes, vq, "tok_embeddings.weight")
        vq_config = detect_vq(codes, vq)
        downsampling = 2 ** (len(vq_config["encoder_ch_mult"]) - 1)
        config = detect_transformer(gpt, transformer, downsampling, n_head, grid_size)
        _check_compatible(config, transformer, vq_config, vq, id2label)
        parts: dict[str, Any] = {}
        if text_encoder is not None:
            parts |= _read_text_encoder(Path(text_encoder), Path(tokenizer or text_encoder), config, dtype)
        parts["vqvae"] = build_network(VQModel, vq_config, codes, vq)
        parts["transformer"] = build_network(LlamaGenTransformer, config, gpt, transformer, dtype)
        write_image_model(folder, "LlamaGenPipeline", parts, DEFAULTS[config["condition"]], id2label and Path(id2label))
    return output


def _check_compatible(
    config: dict[str, Any], transformer: Path, vq_config: dict[str, Any], vq: Path, id2label: Path | None
) -> None:
    if config["vocab_size"] != vq_config["codebook_size"]:
        raise ValueError(
            f"{transformer} and {vq} do not belong together: the transformer generates from "
            f"{config['vocab_size']} tokens, the image tokenizer has {vq_config['codebook_size']} codes"
        )
    if id2label is not None and config["condition"] != "class":
        raise ValueError("id2label names classes, but this transformer is text-conditional")


# -- sizes from shapes ---------------------------------------------------------------------------------------


def detect_transformer(
    state: State, file: Path, downsampling: int, n_head: int | None = None, grid_size: int | None = None
) -> dict[str, Any]:
    """Infer the arguments of `LlamaGenTransformer` from a state dict; removes a leftover `freqs_cis` from it."""

    def shape(name: str, dims: int = 2) -> torch.Size:
        return require_shape(state, name, dims, file, "LlamaGen transformer")

    vocab, dim = shape("tok_embeddings.weight")
    qkv, hidden = shape("layers.0.attention.wqkv.weight")[0], shape("layers.0.feed_forward.w1.weight")[0]
    config: dict[str, Any] = {"dim": dim, "n_layer": count_modules(state, "layers."), "vocab_size": vocab}
    if "cls_embedding.embedding_table.weight" in state:
        config["condition"] = "class"
        # The last row is the null class.
        config["num_classes"] = shape("cls_embedding.embedding_table.weight")[0] - 1
        if config["num_classes"] < 1:
            raise ValueError(f"{file} has no class but the null class")
    else:
        config["condition"] = "text"
        config["cls_token_num"], config["caption_dim"] = shape("cls_embedding.uncond_embedding")

    # The official rotary table, [conditioning rows + grid cells, head width / 2, 2]: evidence of the sizes, not a weight.
    rows = pairs = None
    if "freqs_cis" in state:
        rows, pairs, _ = shape("freqs_cis", 3)
        del state["freqs_cis"]
    config["n_head"] = heads = resolve_num_heads(file, dim, config["n_layer"], pairs, n_head)
    kv_heads = (qkv // (dim // heads) - heads) // 2
    if kv_heads != heads:
        config["n_kv_head"] = max(kv_heads, 1)

    least = 8 * dim // 3
    multiples = [m for m in (256, 128, 64, 32, 16, 8, 4, 2, 1, hidden) if m * math.ceil(least / m) == hidden]
    if not multiples:
        raise ValueError(f"{file} has a feed-forward width of {hidden}, width {dim} wants at least {least}")
    config["multiple_of"] = multiples[0]
    cells = None if rows is None else rows - config.get("cls_token_num", 1)
    config["grid_size"] = resolve_grid_size(file, cells, downsampling, grid_size)
    return config


def resolve_num_heads(file: Path, dim: int, layers: int, pairs: int | None, given: int | None) -> int:
    stored = None if pairs is None else dim // (2 * pairs)
    heads = given or stored or HEADS.get((dim, layers))
    if heads is None:
        raise ValueError(
            f"{file} has width {dim} and {layers} layers, which is no official size, and no tensor's shape "
            "tells the number of heads: give n_head"
        )
    if stored is not None and heads != stored:
        raise ValueError(f"n_head={heads} contradicts {file}, whose freqs_cis is made for {stored} heads")
    if heads < 0 or dim % heads:
        raise ValueError(f"n_head={heads} does not divide the width {dim} of {file}")
    return heads


def resolve_grid_size(file: Path, cells: int | None, downsampling: int, given: int | None) -> int:
    """Return the side of the grid: from the rotary table's rows, else as given, else from the pixels in the file name."""
    if cells is not None:
        side = math.isqrt(max(cells, 0))
        if side * side != cells or side == 0:
            raise ValueError(f"the freqs_cis of {file} is made for {cells} tokens, which fill no square grid")
        if given not in (None, side):
            raise ValueError(f"grid_size={given} contradicts {file}: its freqs_cis is made for {side} x {side}")
        return side
    if given is not None:
        if given < 1:
            raise ValueError(f"grid_size must be at least 1, got {given}")
        return given
    pixels = set(re.findall(r"(?<!\d)(?:256|384|512)(?!\d)", file.stem))
    if len(pixels) != 1:
        raise ValueError(
            f"the grid of {file} is unknown: the weights fit any, and the file name does not say 256, 384 or "
            f"512 pixels. Give grid_size, the tokens along a side (pixels / {downsampling})"
        )
    return int(pixels.pop()) // downsampling


def detect_vq(state: State, file: Path) -> dict[str, Any]:
    """Infer the arguments of `VQModel` from a state dict; adds the usage counter, needed only in training, if it is missing."""

    def shape(name: str, dims: int = 4) -> torch.Size:
        return require_shape(state, name, dims, file, "LlamaGen image tokenizer")

    def width_multipliers(half: str) -> list[int]:
        levels = range(count_modules(state, f"{half}.conv_blocks."))
        widths = [shape(f"{half}.conv_blocks.{i}.res.0.conv1.weight")[0] for i in levels]
        if not widths or any(width % ch for width in widths):
            raise ValueError(f"{file} has {half} widths {widths}, expected multiples of {ch}")
        return [width // ch for width in widths]

    ch, in_channels = shape("encoder.conv_in.weight")[:2]
    out_channels = shape("decoder.conv_out.weight")[0]
    if (in_channels, out_channels) != (3, 3):
        raise ValueError(f"{file} has {in_channels} input and {out_channels} output channels, expected 3 and 3")
    codes, code_width = shape("quantize.embedding.weight", 2)
    state.setdefault("quantize.codebook_used", torch.zeros(CODEBOOK_USED_SLOTS))
    return {
        "codebook_size": codes,
        "codebook_embed_dim": code_width,
        "ch": ch,
        "encoder_ch_mult": width_multipliers("encoder"),
        "decoder_ch_mult": width_multipliers("decoder")[::-1],
        "num_res_blocks": count_modules(state, "encoder.conv_blocks.0.res."),
        "z_channels": shape("encoder.conv_out.weight")[0],
        "in_channels": in_channels,
        "out_channels": out_channels,
    }


# -- text encoder --------------------------------------------------------------------------------------------


def _read_text_encoder(folder: Path, tokenizer: Path, config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    if config["condition"] != "text":
        raise ValueError("text_encoder goes with a text model, but this transformer is class-conditional")
    try:
        stored = StoredNetwork(folder, TEXT_ENCODERS["T5EncoderModel"])
        if stored.config.d_model != config["caption_dim"]:
            raise ValueError(f"expected a T5 encoder of width {config['caption_dim']}")
        words = load_tokenizer(tokenizer, choose_class(tokenizer, "T5TokenizerFast", "PreTrainedTokenizerFast"))
        parts = {"text_encoder": stored.load(dtype), "tokenizer": words}
    except ValueError as error:
        raise ValueError(f"cannot use the text encoder {folder}, tokenizer {tokenizer}: {error}") from error
    return parts

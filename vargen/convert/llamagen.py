"""Conversion of official LlamaGen files, a transformer and its image tokenizer, to a folder for `LlamaGenPipeline`.

Sizes are inferred from the shapes; heads and grid come from the official table, the file name or the caller.
"""

from __future__ import annotations

import math
import re
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
from vargen.convert.ta_tok import convert_ta_tok
from vargen.files import atomic_folder
from vargen.folders.tokenizers import choose_class, load_tokenizer
from vargen.folders.transformers_networks import StoredNetwork
from vargen.models.llamagen.network import SIZES, LlamaGenTransformer
from vargen.models.text_encoder import TEXT_ENCODERS
from vargen.models.tokenizers.vq import CODEBOOK_USED_SLOTS, VQModel

# (width, layers) -> heads: the released sizes, then 1B, XXXL and 7B, whose weights were not released.
HEADS = {(size["dim"], size["n_layer"]): size["n_head"] for size in SIZES.values()}
HEADS |= {(2048, 22): 32, (2560, 48): 40, (4096, 32): 32}
HEADS |= {(384, 12): 6, (1280, 30): 20}  # of Tar's detokenizer
TAR_TOKENS = 27**2  # that its detokenizer takes
# Sampling settings of the official demos.
DEFAULTS: dict[str, dict[str, Any]] = {
    "class": {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 2000, "top_p": 1.0},
    "text": {"guidance_scale": 7.5, "temperature": 1.0, "top_k": 1000, "top_p": 1.0},
    "features": {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 1200, "top_p": 0.95},
}


def convert_llamagen(
    transformer: Path,
    vq: Path,
    output: Path,
    *,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
    ta_tok: Path | None = None,
    id2label: Path | None = None,
    dtype: torch.dtype | None = None,
    n_head: int | None = None,
    grid_size: int | None = None,
) -> Path:
    """Convert official LlamaGen files, or the index of their parts, to a pipeline folder.

    Args:
        transformer: class- or text-conditional GPT: `.pt`, `.pth`, `.bin`, `.ckpt`, `.safetensors` or an index of such parts.
        vq: its image tokenizer (VQ-16, VQ-8 or similar); EMA weights if the file has them. Its dtype is kept.
        output: folder to create. It appears whole or not at all.
        text_encoder: folder of a T5 encoder (official: flan-t5-xl), for text models. Without one, the pipeline
            takes `prompt_embeds` instead of a prompt.
        tokenizer: folder of its tokenizer; default: the text encoder's folder.
        ta_tok: TA-Tok, whose decoder the detokenizer of Tar needs, if the transformer is one (`ar_dtok_lp_512px.pth`).
        id2label: JSON file of class names, `{"0": "name, synonym"}` or a list of names, for class models.
        dtype: storage dtype of the transformer and the text encoder; by default those of the files.
        n_head: number of attention heads, for a width and depth outside the official table.
        grid_size: side of the token grid, if neither the file nor its name (256, 384 or 512 pixels) determines it.
    """
    if tokenizer is not None and text_encoder is None:
        raise ValueError("tokenizer comes with a text_encoder; give both, or neither and use prompt_embeds")
    with atomic_folder(output) as folder:
        require_inputs(
            transformer=transformer, vq=vq, id2label=id2label, text_encoder=text_encoder, tokenizer=tokenizer, ta_tok=ta_tok
        )
        gpt, codes = read_checkpoint(transformer), read_checkpoint(vq, prefer="ema")
        vq_config = detect_vq(codes, vq)
        config = detect_transformer(gpt, transformer, 2 ** (len(vq_config["encoder_ch_mult"]) - 1), n_head, grid_size)
        require_equal(f"{transformer} and {vq}", ("codes", config["vocab_size"], vq_config["codebook_size"]))
        if id2label is not None and config["condition"] != "class":
            raise ValueError("id2label names classes, but this transformer is text-conditional")
        parts: dict[str, Any] = {}
        if text_encoder is not None:
            if config["condition"] != "text":
                raise ValueError("text_encoder goes with a text model, but this transformer is class-conditional")
            parts |= read_text_encoder(text_encoder, tokenizer or text_encoder, config["caption_dim"], dtype)
        if (ta_tok is not None) != (config["condition"] == "features"):
            raise ValueError("ta_tok goes with the detokenizer of Tar, and with no other transformer")
        if ta_tok is not None:
            parts["ta_tok"] = convert_ta_tok(ta_tok)
            require_equal(f"{transformer} and {ta_tok}", ("features", config["caption_dim"], parts["ta_tok"].config.dim))
        parts["vqvae"] = build_network(VQModel, vq_config, codes, vq)
        parts["transformer"] = build_network(LlamaGenTransformer, config, gpt, transformer, dtype)
        write_image_model(folder, "LlamaGenPipeline", parts, DEFAULTS[config["condition"]], id2label)
    return output


def detect_transformer(
    state: State, file: Path, downsampling: int, n_head: int | None = None, grid_size: int | None = None
) -> dict[str, Any]:
    """Infer the arguments of `LlamaGenTransformer`; removes a leftover `freqs_cis`."""
    shape = partial(require_shape, state, file, "LlamaGen transformer")
    vocab, dim = shape("tok_embeddings.weight")
    qkv, hidden = shape("layers.0.attention.wqkv.weight")[0], shape("layers.0.feed_forward.w1.weight")[0]
    config: dict[str, Any] = {"dim": dim, "n_layer": count_modules(state, "layers."), "vocab_size": vocab}
    if "cls_embedding.embedding_table.weight" in state:
        classes = shape("cls_embedding.embedding_table.weight")[0] - 1  # the last row is the null class
        if classes < 1:
            raise ValueError(f"{file} has no class but the null class")
        config |= {"condition": "class", "num_classes": classes}
    elif "clip_proj.weight" in state:
        config |= _read_learned_positions(state, file)
    else:
        rows, width = shape("cls_embedding.uncond_embedding")
        config |= {"condition": "text", "cls_token_num": rows, "caption_dim": width}

    # The official rotary table, [conditioning rows + grid cells, head width / 2, 2], is evidence and not a weight.
    heads = side = None
    if "freqs_cis" in state:
        rows, pairs, _ = shape("freqs_cis", 3)
        cells = rows - config.get("cls_token_num", 1)
        heads = dim // (2 * pairs)
        side = math.isqrt(max(cells, 0))
        if side**2 != cells or side == 0:
            raise ValueError(f"the freqs_cis of {file} is made for {cells} tokens, which fill no square grid")
        del state["freqs_cis"]
    heads = _reconcile(file, "n_head", n_head, heads)
    side = _reconcile(file, "grid_size", grid_size, config.pop("grid_size", side))
    if heads is None and (heads := HEADS.get((dim, config["n_layer"]))) is None:
        raise ValueError(f"{file} has width {dim} and {config['n_layer']} layers, which is no official size: give n_head")
    if heads < 1 or dim % heads:
        raise ValueError(f"n_head={heads}, as given or as in freqs_cis, does not divide the width {dim} of {file}")
    config |= {"n_head": heads, "grid_size": _read_grid(file, downsampling) if side is None else side}
    kv_heads = (qkv // (dim // heads) - heads) // 2
    if kv_heads != heads:
        config["n_kv_head"] = max(kv_heads, 1)

    least = 8 * dim // 3
    multiples = [m for m in (256, 128, 64, 32, 16, 8, 4, 2, 1, hidden) if m * math.ceil(least / m) == hidden]
    if not multiples:
        raise ValueError(f"{file} has a feed-forward width of {hidden}, width {dim} wants at least {least}")
    return config | {"multiple_of": multiples[0]}


def _read_learned_positions(state: State, file: Path) -> dict[str, Any]:
    """Return settings of the detokenizer of Tar, whose tensors get our names: 729 rows of features, and a square of tokens."""
    shape = partial(require_shape, state, file, "detokenizer of Tar")
    width, places = shape("clip_proj.weight")[1], shape("abs_pe", dims=3)[1]
    cells = places + 1 - TAR_TOKENS
    side = math.isqrt(max(cells, 0))
    if side == 0 or side**2 != cells:
        raise ValueError(f"the abs_pe of {file} is for {places + 1} rows, and not for {TAR_TOKENS} and a square of tokens")
    for name in ("weight", "bias"):
        shape(f"clip_proj.{name}", dims=2 if name == "weight" else 1)
        state[f"cls_embedding.{name}"] = state.pop(f"clip_proj.{name}")
    state["abs_pe"] = state["abs_pe"][0]
    return {"condition": "features", "caption_dim": width, "cls_token_num": TAR_TOKENS, "grid_size": side}


def _reconcile(file: Path, name: str, given: int | None, stored: int | None) -> int | None:
    """Return a number as given, else as the rotary table has it, if there is one."""
    if stored is not None and (given or stored) != stored:
        raise ValueError(f"{name}={given} contradicts {file}, whose freqs_cis is made for {stored}")
    return stored if given is None else given


def _read_grid(file: Path, downsampling: int) -> int:
    """Return the side of the grid by the pixels in the file name."""
    pixels = set(re.findall(r"(?<!\d)(?:256|384|512)(?!\d)", file.stem))
    if len(pixels) != 1:
        given_by = f"give grid_size, the tokens along a side (pixels / {downsampling})"
        raise ValueError(f"the grid of {file} is unknown, as its name does not say 256, 384 or 512 pixels: {given_by}")
    return int(pixels.pop()) // downsampling


def detect_vq(state: State, file: Path) -> dict[str, Any]:
    """Infer the arguments of `VQModel`; adds the usage counter of training if it is missing."""
    shape = partial(require_shape, state, file, "LlamaGen image tokenizer", dims=4)
    state.setdefault("quantize.codebook_used", torch.zeros(CODEBOOK_USED_SLOTS))
    codes, code_width = shape("quantize.embedding.weight", dims=2)
    ch = shape("encoder.conv_in.weight")[0]

    def width_multipliers(half: str) -> list[int]:
        levels = range(max(1, count_modules(state, f"{half}.conv_blocks.")))
        return [shape(f"{half}.conv_blocks.{i}.res.0.conv1.weight")[0] // ch for i in levels]

    return {
        "codebook_size": codes,
        "codebook_embed_dim": code_width,
        "ch": ch,
        "encoder_ch_mult": width_multipliers("encoder"),
        "decoder_ch_mult": width_multipliers("decoder")[::-1],
        "num_res_blocks": count_modules(state, "encoder.conv_blocks.0.res."),
        "z_channels": shape("encoder.conv_out.weight")[0],
    }


def read_text_encoder(folder: Path, tokenizer: Path, width: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return a T5 encoder whose features have this width, and its tokenizer, by the names of components."""
    try:
        stored = StoredNetwork(folder, TEXT_ENCODERS["T5EncoderModel"])
        if stored.config.d_model != width:
            raise ValueError(f"expected a T5 encoder of width {width}")
        words = load_tokenizer(tokenizer, choose_class(tokenizer, "T5TokenizerFast", "PreTrainedTokenizerFast"))
        return {"text_encoder": stored.load(dtype), "tokenizer": words}
    except ValueError as error:
        raise ValueError(f"cannot use the text encoder {folder}, tokenizer {tokenizer}: {error}") from error

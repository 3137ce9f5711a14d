"""Small real models with random weights, for tests of what is built around them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

import vargen.assets
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.vq import VQModel
from vargen.pipelines.llamagen import LlamaGenPipeline


def tiny_vq() -> VQModel:
    torch.manual_seed(1)
    return VQModel(
        codebook_size=64, ch=32, encoder_ch_mult=(1, 1), decoder_ch_mult=(1, 1), num_res_blocks=1, z_channels=32
    ).eval()


def tiny_transformer(condition: str = "text", **overrides) -> LlamaGenTransformer:
    torch.manual_seed(0)
    arguments = {
        "dim": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "grid_size": 4, "num_classes": 10,
        "caption_dim": 384, "cls_token_num": 12, "multiple_of": 32, **overrides,
    }  # fmt: skip
    model = LlamaGenTransformer(condition=condition, **arguments).eval()
    torch.nn.init.normal_(model.output.weight, std=0.3)  # zero as built: every probs would be uniform
    for layer in model.layers:
        torch.nn.init.normal_(layer.attention.wqkv.weight, std=0.2)
    return model


def class_pipeline(**overrides) -> LlamaGenPipeline:
    return LlamaGenPipeline(
        vqvae=tiny_vq(), transformer=tiny_transformer("class", **overrides), id2label={3: "cat, kitty", 4: "dog"}
    )


def text_pipeline(encoder: Path | None = None, **overrides) -> LlamaGenPipeline:
    encoder = encoder or Path(vargen.assets.__file__).parent / "emoji"
    return LlamaGenPipeline(
        vqvae=tiny_vq(),
        transformer=tiny_transformer("text", **overrides),
        text_encoder=MiniLMTextEncoder.from_pretrained(encoder / "text_encoder"),
        tokenizer=AutoTokenizer.from_pretrained(encoder / "tokenizer"),
    )

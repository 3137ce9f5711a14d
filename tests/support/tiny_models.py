"""Small real models with random weights, for tests of what is built around them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from transformers import AutoTokenizer

from vargen.assets import packaged_model_path
from vargen.models.infinity.network import InfinityTransformer
from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.bsq import BSQModel
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.vq import VQModel
from vargen.models.var.network import VARTransformer
from vargen.pipelines.infinity import InfinityPipeline
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.pipelines.var import VARPipeline


@cache
def tiny_encoder() -> Path:
    """A folder with a text encoder of one narrow layer and the packaged tokenizer; its features have 32 columns."""
    folder = Path(tempfile.mkdtemp(prefix="vargen-encoder-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = MiniLMTextEncoder(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    network.save_pretrained(folder / "text_encoder")
    shutil.copytree(packaged_model_path("emoji") / "tokenizer", folder / "tokenizer")
    return folder


def tiny_vq() -> VQModel:
    torch.manual_seed(1)
    return VQModel(
        codebook_size=64, ch=32, encoder_ch_mult=(1, 1), decoder_ch_mult=(1, 1), num_res_blocks=1, z_channels=32
    ).eval()


def tiny_transformer(condition: str = "text", **overrides) -> LlamaGenTransformer:
    torch.manual_seed(0)
    arguments = {
        "dim": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "grid_size": 4, "num_classes": 10,
        "caption_dim": 32, "cls_token_num": 12, "multiple_of": 32, **overrides,
    }  # fmt: skip
    model = LlamaGenTransformer(condition=condition, **arguments).eval()
    torch.nn.init.normal_(model.output.weight, std=0.3)  # zero as built: every probs would be uniform
    for layer in model.layers:
        torch.nn.init.normal_(layer.attention.wqkv.weight, std=0.2)
    if condition == "text":
        for layer in (model.cls_embedding.cap_proj.fc1, model.cls_embedding.cap_proj.fc2):
            torch.nn.init.normal_(layer.weight, std=0.5)
    return model


def attentive_transformer(condition: str = "class", **overrides) -> LlamaGenTransformer:
    """Weights and gains large enough that attention is far from uniform, in a grid of 4 x 4; the head is zero as built."""
    torch.manual_seed(0)
    shape = {
        "dim": 48, "n_layer": 2, "n_head": 3, "vocab_size": 40, "grid_size": 4, "num_classes": 10, "caption_dim": 12,
        "cls_token_num": 6, "multiple_of": 16, **overrides,
    }  # fmt: skip
    model = LlamaGenTransformer(condition=condition, **shape).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[1] ** 0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def class_pipeline(**overrides) -> LlamaGenPipeline:
    return LlamaGenPipeline(
        vqvae=tiny_vq(), transformer=tiny_transformer("class", **overrides), id2label={3: "cat, kitty", 4: "dog"}
    )


def text_pipeline(**overrides) -> LlamaGenPipeline:
    return LlamaGenPipeline(
        vqvae=tiny_vq(),
        transformer=tiny_transformer("text", **overrides),
        text_encoder=MiniLMTextEncoder.from_pretrained(tiny_encoder() / "text_encoder"),
        tokenizer=AutoTokenizer.from_pretrained(tiny_encoder() / "tokenizer"),
    )


def t5_pipeline() -> LlamaGenPipeline:
    """A pipeline whose text encoder is a T5."""
    from transformers import T5Config, T5EncoderModel

    pipe = text_pipeline()
    torch.manual_seed(0)
    sizes = {"vocab_size": 30_522, "d_model": 32, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    pipe.register_modules(text_encoder=T5EncoderModel(T5Config(**sizes)).eval())
    return pipe


def tiny_multi_scale_vq(**overrides) -> MultiScaleVQModel:
    """8 x 8 pixels in 4 scales, 30 tokens."""
    shape = {
        "codebook_size": 64, "codebook_embed_dim": 8, "ch": 32, "ch_mult": (1, 1), "num_res_blocks": 1, "scales": (1, 2, 3, 4),
        **overrides,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return MultiScaleVQModel(**shape).eval()


def teacher_inputs(model: MultiScaleVQModel, tokens: list[torch.Tensor]) -> torch.Tensor:
    """The transformer's inputs in teacher forcing, of scales 1 to S - 1."""
    sums = [model.accumulate_latents(tokens[: k + 1]) for k in range(len(tokens) - 1)]
    return torch.cat([model.quantize.transformer_input(f_hat, k + 1) for k, f_hat in enumerate(sums)], 1)


def tiny_var(condition: str = "text", seed: int = 0, **overrides) -> VARTransformer:
    """Weights large enough that pictures depend on their condition; much is zero as built."""
    shape = {
        "scales": (1, 2, 3, 4), "depth": 2, "dim": 32, "n_head": 2, "vocab_size": 64, "code_dim": 8, "num_classes": 10,
        "caption_dim": 32, "caption_rows": 12, **overrides,
    }  # fmt: skip
    model = VARTransformer(condition=condition, **shape).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5, generator=generator)
    return model


def class_var_pipeline(draft: bool = True, vq: dict | None = None, **overrides) -> VARPipeline:
    return VARPipeline(
        vqvae=tiny_multi_scale_vq(**(vq or {})),
        transformer=tiny_var("class", **overrides),
        draft_transformer=tiny_var("class", seed=5, depth=1, dim=16, n_head=1) if draft else None,
        id2label={3: "cat, kitty", 4: "dog"},
        defaults={"guidance_scale": 3.0},
    )


def text_var_pipeline(draft: bool = True, **overrides) -> VARPipeline:
    return VARPipeline(
        vqvae=tiny_multi_scale_vq(),
        transformer=tiny_var("text", **overrides),
        text_encoder=MiniLMTextEncoder.from_pretrained(tiny_encoder() / "text_encoder"),
        tokenizer=AutoTokenizer.from_pretrained(tiny_encoder() / "tokenizer"),
        draft_transformer=tiny_var("text", seed=5, depth=1, dim=16, n_head=1) if draft else None,
        defaults={"guidance_scale": 3.0},
    )


def tiny_bsq(**overrides) -> BSQModel:
    """12 x 12 pixels with the first four scales, 4 bits a token."""
    shape = {"bits": 4, "ch": 32, "encoder_ch_mult": (1, 1), "decoder_ch_mult": (1, 1), "num_res_blocks": 1, **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return BSQModel(**shape).eval()


def tiny_infinity(seed: int = 0, **overrides) -> InfinityTransformer:
    shape = {
        "depth": 4, "dim": 32, "n_head": 2, "code_dim": 4, "caption_dim": 32, "caption_rows": 12, "num_scales": 4, **overrides,
    }  # fmt: skip
    model = InfinityTransformer(**shape).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5, generator=generator)
    return model


def infinity_pipeline(draft: bool = True, **overrides) -> InfinityPipeline:
    """Four layers with random weights."""
    return InfinityPipeline(
        vqvae=tiny_bsq(),
        transformer=tiny_infinity(**overrides),
        text_encoder=MiniLMTextEncoder.from_pretrained(tiny_encoder() / "text_encoder"),
        tokenizer=AutoTokenizer.from_pretrained(tiny_encoder() / "tokenizer"),
        draft_transformer=tiny_infinity(seed=5, depth=1, dim=16, n_head=1) if draft else None,
        defaults={"guidance_scale": 3.0},
    )

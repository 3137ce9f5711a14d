"""A tiny random `GlmImagePipeline` of diffusers, with all parts."""

from __future__ import annotations

from typing import Any

import torch
from tiny_language_models import make_glm


def make_glm_pipeline() -> Any:
    """A pipeline whose language model samples the most probable id."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, GlmImagePipeline, GlmImageTransformer2DModel
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    model, processor = make_glm(seed=1, max_position_embeddings=4096)
    model.generation_config.top_k = 1
    torch.manual_seed(0)
    encoder = T5EncoderModel(T5Config(vocab_size=400, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, block_out_channels=(4,) * 4,
        latent_channels=4, norm_num_groups=2, latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    transformer = GlmImageTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, text_embed_dim=16,
        time_embed_dim=16, condition_dim=8, prior_vq_quantizer_codebook_size=28,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = GlmImagePipeline(
        ByT5Tokenizer(), processor, encoder.eval(), model, vae.eval(), transformer.eval(), scheduler
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe

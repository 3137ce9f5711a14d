"""A pair of tiny random pipelines of diffusers' Helios: a target with guidance and a distilled drafter, which share a VAE."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tiny_video import randomised
from tiny_wan import TEXT, VAE, save_tokenizer
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from diffusers import (  # isort: skip  (after the torchvision guard)
    AutoencoderKLWan,
    HeliosDMDScheduler,
    HeliosPipeline,
    HeliosPyramidPipeline,
    HeliosScheduler,
    HeliosTransformer3DModel,
)

# Latents of 8 x 8: three stages of a pyramid have 2 x 2 at the start.
SIZE = {"height": 64, "width": 64, "num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1]}
NETWORK: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16, "text_dim": TEXT["d_model"],
    "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_dim": (4, 4, 4),
}  # fmt: skip


@cache
def vae() -> Any:
    return randomised(AutoencoderKLWan(**VAE), 3, 0.2)


def network(seed: int = 0, **changes: Any) -> Any:
    return randomised(HeliosTransformer3DModel(**{**NETWORK, **changes}), seed, 0.2)


def make_base(folder: Any, **changes: Any) -> Any:
    """The target, with the only text encoder."""
    save_tokenizer(folder)
    encoder = randomised(UMT5EncoderModel(UMT5Config(**TEXT, feed_forward_proj="gated-gelu")), 4, 0.5)
    parts = {"tokenizer": AutoTokenizer.from_pretrained(folder), "text_encoder": encoder, "vae": vae()}
    scheduler = HeliosScheduler(stages=1, use_dynamic_shifting=True)
    return quiet(HeliosPipeline(**parts, scheduler=scheduler, transformer=network(**changes)))


def make_mid(base: Any) -> Any:
    """A pyramid with CFG-Zero*, around the parts of another pipeline."""
    parts = {"tokenizer": base.tokenizer, "text_encoder": base.text_encoder, "vae": base.vae}
    return quiet(
        HeliosPyramidPipeline(**parts, scheduler=HeliosScheduler(gamma=0.3), transformer=network(2), is_cfg_zero_star=True)
    )


def make_distilled(vae: Any = None, **changes: Any) -> Any:
    """The drafter, without a text encoder."""
    parts = {"tokenizer": None, "text_encoder": None, "vae": vae or globals()["vae"]()}
    transformer = network(1, **{"num_layers": 1, **changes})
    return quiet(
        HeliosPyramidPipeline(**parts, scheduler=HeliosDMDScheduler(gamma=0.3), transformer=transformer, is_distilled=True)
    )


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

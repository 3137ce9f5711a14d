"""A tiny data set of clips, a tiny video model to train on it, and features of captions without a text encoder."""

import tempfile
from pathlib import Path

import numpy as np
import torch

from recipes.emoji_video.batches import clip_latents
from recipes.emoji_video.clips import VideoDataset
from recipes.emoji_video.transformer import VideoConfig
from vargen.models.condition import Condition
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.config import Schedule

CPU = torch.device("cpu")
VAE = {"size": 16, "widths": [8, 16, 32], "transformer_blocks": 1}
SHAPE = {
    "dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 1, "channels": 4, "height": 2, "width": 2, "patch": 1,
    "block_frames": 2, "spatial_stride": 8, "temporal_stride": 1, "fps": 12, "text_dim": 8, "text_len": None, "text_mask": True,
    "freq_dim": 16, "motion_levels": 2,
}  # fmt: skip


def data(count: int = 10, frames: int = 6, size: int = 16) -> VideoDataset:
    random = np.random.default_rng(0)
    clips = np.full((count, frames, size, size, 3), 255, dtype=np.uint8)
    records = []
    for i, clip in enumerate(clips):
        color = random.integers(0, 255, 3)
        for t, frame in enumerate(clip):
            x = round((size - 6) * (0.5 + 0.5 * np.cos(2 * np.pi * t / frames)))
            frame[5:11, x : x + 6] = color
        records.append(
            {
                "split": "validation" if i < 2 else "train", "loops": i % 2 == 0, "motion": float(i + 1), "label": f"thing {i}",
                "group": "objects", "style": "3d", "concept": str(i),
            }
        )  # fmt: skip
    return VideoDataset(clips, records)


def recipe(**changes) -> VideoConfig:
    base = {
        "schedule": Schedule(steps=6, learning_rate=3e-3, warmup_steps=1), "batch_size": 3, "max_caption_tokens": 6,
        "euler_steps": 4, "diffusion_forcing_fraction": 0.5, "self_rollout_probability": 0.5, "evaluate_every": 4,
        "checkpoint_every": 2, "levels": [1000, 500],
    }  # fmt: skip
    return VideoConfig(**{"model": SHAPE, **base, **changes})


class Bank:
    """Features that are a function of the words."""

    def __init__(self, *arguments):
        pass

    def __call__(self, texts):
        rows = [torch.randn(3, 8, generator=torch.Generator().manual_seed(sum(map(ord, text)))) for text in texts]
        return Condition(caption_embeds=torch.stack(rows), caption_mask=torch.ones(len(texts), 3, dtype=torch.bool))


def clip_latents_of(vae, clips):
    with tempfile.TemporaryDirectory() as folder:
        return clip_latents(Path(folder), clips, CausalVideoVAE.from_pretrained(vae), CPU)

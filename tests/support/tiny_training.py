"""A data set and a recipe at tiny size, for tests of trainings."""

from __future__ import annotations

import numpy as np

from recipes.emoji.dataset import EmojiDataset
from vargen.training.config import NextTokenConfig, Schedule


def data(count: int = 24, size: int = 16) -> EmojiDataset:
    random = np.random.default_rng(0)
    images = np.full((count, size, size, 3), 255, dtype=np.uint8)
    records = []
    for i in range(count):
        images[i, 4:12, 4:12] = random.integers(0, 255, 3)
        records.append(
            {
                "label": f"thing {i % 5}", "concept": f"{i}", "tags": ["round"], "synonyms": [], "tones": [],
                "skin_tone": False, "group": "objects",
                "style": ("3d", "flat", "noto", "twemoji")[i % 4], "weight": 1.0, "split": "validation" if i < 4 else "train",
            }
        )  # fmt: skip
    return EmojiDataset(images, records)


def generator_recipe(**changes) -> NextTokenConfig:
    model = {
        "dim": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "grid_size": 8, "caption_dim": 384,
        "cls_token_num": 16, "multiple_of": 32,
    }  # fmt: skip
    base = {
        "schedule": Schedule(steps=14, learning_rate=3e-3, warmup_steps=2), "batch_size": 4, "shift_variants": 1,
        "dropout": 0.1, "token_noise": 0.1, "near_noise": 0.2, "start_weight": 5.0, "drawn": 0,
        "mirrored": 0.5, "recoloured": 0.3,
        "evaluate_every": 7, "checkpoint_every": 5,
    }  # fmt: skip
    return NextTokenConfig(model=model, **{**base, **changes})

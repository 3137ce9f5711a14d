"""What `vargen.training` trains for anyone, trained on emoji, and the scorer beside its packaged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recipes.emoji.config import ScorerConfig
from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.evaluation import caption_recall
from recipes.emoji.scorer import train_scorer
from vargen.training.config import NextTokenConfig
from vargen.training.generated_images import select_prompt_source
from vargen.training.heads import load_target, train_head
from vargen.training.heads_config import HeadConfig
from vargen.training.low_res import train_low_res
from vargen.training.next_token import train_next_token


def train_emoji_generator(config: NextTokenConfig, data: EmojiDataset, device: torch.device, **inputs: Any) -> dict[str, float]:
    """`train_next_token`, which generates images and looks for their captions at each evaluation."""
    return train_next_token(config, data, device=device, image_metrics=caption_recall(data, config, device), **inputs)


def train_emoji_low_res(config: NextTokenConfig, data: EmojiDataset, device: torch.device, **inputs: Any) -> dict[str, float]:
    """`train_low_res`, likewise."""
    return train_low_res(config, data, device=device, image_metrics=caption_recall(data, config, device), **inputs)


def train_emoji_scorer(
    config: ScorerConfig, data: EmojiDataset, model: Path, folder: Path, device: torch.device
) -> dict[str, float]:
    """`train_scorer` beside a model folder, which holds `text_encoder/`, `tokenizer/` and `vqvae/`."""
    return train_scorer(config, data, model, model / "vqvae", folder, device)


def train_eagle(config: HeadConfig, **inputs: Any) -> dict[str, float]:
    """EAGLE's layer for the packaged model; see `_train_head`."""
    return _train_head("eagle", config, **inputs)


def train_medusa(config: HeadConfig, **inputs: Any) -> dict[str, float]:
    """Medusa's heads for the packaged model; see `_train_head`."""
    return _train_head("medusa", config, **inputs)


def _train_head(
    kind: str,
    config: HeadConfig,
    data: EmojiDataset,
    model: Path,
    folder: Path,
    device: torch.device,
    generated_images: Path | None = None,
) -> dict[str, float]:
    pipe = load_target(model, device)
    source = select_prompt_source(pipe, config.pictures, lambda: data)
    return train_head(kind, config, pipe, source, folder, generated_images)

"""The trainers of `vargen.training`, applied to the emoji data, and the scorer with the packaged model's text encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.evaluation import caption_recall
from recipes.emoji.scorer import ScorerConfig, train_scorer
from vargen.training.generated_images import select_prompt_source
from vargen.training.heads import HeadConfig, load_target, train_head
from vargen.training.low_res import train_low_res
from vargen.training.next_token import NextTokenConfig, train_next_token


def train_emoji_generator(config: NextTokenConfig, data: EmojiDataset, device: torch.device, **inputs: Any) -> dict[str, float]:
    """Run `train_next_token`; evaluations generate images and measure the recall of their captions."""
    return train_next_token(config, data, device=device, image_metrics=caption_recall(data, config, device), **inputs)


def train_emoji_low_res(config: NextTokenConfig, data: EmojiDataset, device: torch.device, **inputs: Any) -> dict[str, float]:
    """Run `train_low_res`, with the same evaluations."""
    return train_low_res(config, data, device=device, image_metrics=caption_recall(data, config, device), **inputs)


def train_emoji_scorer(
    config: ScorerConfig, data: EmojiDataset, model: Path, folder: Path, device: torch.device
) -> dict[str, float]:
    """Run `train_scorer` with the `text_encoder/`, `tokenizer/` and `vqvae/` of a model folder."""
    return train_scorer(config, data, model, model / "vqvae", folder, device)


def train_eagle(config: HeadConfig, **inputs: Any) -> dict[str, float]:
    """Train an EAGLE layer for the packaged model."""
    return _train_head("eagle", config, **inputs)


def train_medusa(config: HeadConfig, **inputs: Any) -> dict[str, float]:
    """Train Medusa heads for the packaged model."""
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
    source = select_prompt_source(pipe, config.num_images, lambda: data)
    return train_head(kind, config, pipe, source, folder, generated_images)

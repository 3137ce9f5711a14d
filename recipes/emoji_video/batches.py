"""What a video model is trained on: latents of clips, computed once, with captions and levels of motion.

Shape suffixes: B clips, F frames, C latent channels, Y/X latent rows and columns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.captions import sample_caption
from recipes.emoji_video.autoencoder import to_video
from recipes.emoji_video.clips import VideoDataset, motion_weights, window_positions
from recipes.emoji_video.config import VideoConfig
from vargen.files import atomic_file
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.causal_video_cache import TextCache
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.caption_bank import CaptionBank
from vargen.weight_files import weights_digest

_CLIPS = 8  # that are encoded at once
NO_CAPTION = ""  # what a dropped caption becomes, and what guidance leads away from


def encoder_digest(vae: CausalVideoVAE) -> str:
    """Changes with whatever decides about latents."""
    statistics = torch.nn.Module()
    statistics.register_buffer("mean", vae.latent_mean)
    statistics.register_buffer("std", vae.latent_std)
    return weights_digest(vae.encoder, statistics)


def check_latents(run: Path, vae: CausalVideoVAE, place: Path) -> None:
    """Raise ValueError if a `run` kept latents, and they are of another encoder than that in `place`."""
    kept = [file.name for file in run.glob("latents-*.npy")]
    if kept and f"latents-{encoder_digest(vae)}.npy" not in kept:
        raise ValueError(f"{run} was trained on the latents of another autoencoder than {place}; give that one")


@torch.no_grad()
def clip_latents(folder: Path, data: VideoDataset, vae: CausalVideoVAE, device: torch.device) -> np.ndarray:
    """Standardised latents of all clips, float16 `[N, F, C, Y, X]`, kept in `folder` for this encoder."""
    path = folder / f"latents-{encoder_digest(vae)}.npy"
    if path.is_file():
        kept = np.load(path, allow_pickle=False)
        if kept.shape[:2] == data.frames.shape[:2]:
            return kept
    parts = [
        vae.encode(to_video(data.frames[start : start + _CLIPS], device)).half().cpu().numpy()
        for start in range(0, len(data.frames), _CLIPS)
    ]
    made = np.concatenate(parts)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        np.save(file, made)
    return made


def motion_levels(data: VideoDataset, levels: int) -> np.ndarray:
    """Level of motion of each clip, int64 `[N]` in 0 to `levels` - 1: as many training clips of each."""
    motion = np.array([record["motion"] for record in data.records])
    if not levels:
        return np.zeros(len(motion), dtype=np.int64)
    borders = np.quantile(motion[data.indices("train")], np.arange(1, levels) / levels)
    return np.searchsorted(borders, motion, side="right").astype(np.int64)


@dataclass(frozen=True)
class Batch:
    """Clips of a step.

    Attributes:
        clean: latents float32 `[B, F, C, Y, X]`. weights: how much each place counts, `[B, F, 1, Y, X]`, of mean about 1.
        texts: captions. motion: int64 `[B]`, levels, the last one for any.
    """

    clean: Tensor
    weights: Tensor
    texts: list[str]
    motion: Tensor


class Batches:
    """Training clips by (seed, step) alone.

    Clips begin at their first frame, so that a caption says how a video begins; of some loops another block comes first, which
    is not learned: that is how a model learns what follows the last block.
    """

    def __init__(
        self, data: VideoDataset, latents: np.ndarray, recipe: VideoConfig, block: int, levels: int, device: torch.device
    ):
        self.data, self.latents, self.recipe, self.block, self.device = data, latents, recipe, block, device
        self.indices = data.indices("train")
        self.cumulative = np.cumsum(motion_weights([data.records[i] for i in self.indices]))
        self.levels, self.of_clip = levels, motion_levels(data, levels)

    def __call__(self, step: int) -> Batch:
        recipe, F = self.recipe, self.latents.shape[1]
        draw = np.random.default_rng((recipe.seed, step))
        words = random.Random(recipe.seed * 1_000_003 + step)
        places = np.searchsorted(self.cumulative, draw.random(recipe.batch_size), side="right")
        chosen = self.indices[places.clip(max=len(self.indices) - 1)]
        clips, weights, texts, motion = [], [], [], []
        for index in chosen:
            record = self.data.records[index]
            rolled = record["loops"] and draw.random() < recipe.rolled
            start = int(draw.integers(1, F // self.block)) * self.block if rolled else 0
            clip = self.latents[index][window_positions(record, F, start, F)].astype(np.float32)
            clips.append(clip)
            weights.append(self.place_weights(clip, rolled))
            texts.append(NO_CAPTION if words.random() < recipe.caption_dropout else sample_caption(record, words))
            told = draw.random() < recipe.motion_told
            motion.append(int(self.of_clip[index]) if told else self.levels)
        clean, places_ = (torch.from_numpy(np.stack(parts)).to(self.device) for parts in (clips, weights))
        return Batch(clean, places_, texts, torch.tensor(motion, device=self.device))

    def place_weights(self, clip: np.ndarray, rolled: bool) -> np.ndarray:
        """`[F, 1, Y, X]`: more where latents move, nothing for a first block that is given."""
        change = np.abs(np.diff(clip, axis=0, prepend=clip[:1])).mean(1, keepdims=True)
        weights = 1 + self.recipe.motion_weight * change / max(float(change.mean()), 1e-6)
        weights = (weights / weights.mean()).astype(np.float32)
        if rolled:
            weights[: self.block] = 0
        return weights


def text_of(model: CausalVideoTransformer, bank: CaptionBank, texts: Sequence[str], motion: Tensor | None = None) -> TextCache:
    """What a model sees of captions."""
    condition = bank(texts)
    assert condition.caption_embeds is not None
    return model.text_cache(condition.caption_embeds, condition.caption_mask, motion if model.config.motion_levels else None)

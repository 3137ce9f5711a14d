"""Training data of a video model: latents of clips, computed once, with captions and motion levels.

Shape suffixes: B clips, F frames, C latent channels, Y/X latent rows and columns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.captions import sample_caption
from recipes.emoji_video.autoencoder import to_video
from recipes.emoji_video.clips import VideoDataset, motion_weights, window_frames
from vargen.files import atomic_file
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.causal_video_cache import TextCache
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.augment import WeightedIndices
from vargen.training.dataset import CaptionBank
from vargen.weight_files import weights_digest

if TYPE_CHECKING:
    from recipes.emoji_video.lora import LoRAConfig
    from recipes.emoji_video.transformer import VideoConfig

_CLIPS = 8  # that are encoded at once
EMPTY_CAPTION = ""  # replaces a dropped caption; guidance leads away from it


def hash_encoder(vae: CausalVideoVAE) -> str:
    """Return a digest of everything that determines the latents."""
    statistics = torch.nn.Module()
    statistics.register_buffer("mean", vae.latent_mean)
    statistics.register_buffer("std", vae.latent_std)
    return weights_digest(vae.encoder, statistics)


def validate_same_encoder(run: Path, vae: CausalVideoVAE, vae_run: Path) -> None:
    """Raise ValueError if a `run` stored latents of an encoder other than `vae_run`'s."""
    cached = [file.name for file in run.glob("latents-*.npy")]
    if cached and f"latents-{hash_encoder(vae)}.npy" not in cached:
        raise ValueError(f"{run} was trained on the latents of another autoencoder than {vae_run}; give that one")


@torch.no_grad()
def clip_latents(folder: Path, data: VideoDataset, vae: CausalVideoVAE, device: torch.device) -> np.ndarray:
    """Return the standardized latents of all clips, float16 `[N, F, C, Y, X]`, stored in `folder` for each encoder."""
    path = folder / f"latents-{hash_encoder(vae)}.npy"
    if path.is_file():
        cached = np.load(path, allow_pickle=False)
        if cached.shape[:2] == data.frames.shape[:2]:
            return cached
    parts = [
        vae.encode(to_video(data.frames[start : start + _CLIPS], device)).half().cpu().numpy()
        for start in range(0, len(data.frames), _CLIPS)
    ]
    latents = np.concatenate(parts)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        np.save(file, latents)
    return latents


def motion_borders(data: VideoDataset, levels: int) -> np.ndarray:
    """Return the motions between `levels` levels that are equally frequent among training clips, ascending."""
    motion = np.array([data.records[i]["motion"] for i in data.indices("train")])
    return np.quantile(motion, np.arange(1, levels) / levels) if levels else np.zeros(0)


def motion_levels(data: VideoDataset, levels: int) -> np.ndarray:
    """Return the motion level of each clip, int64 `[N]` from 0 to `levels` - 1; see `motion_borders`."""
    motion = np.array([record["motion"] for record in data.records])
    return np.searchsorted(motion_borders(data, levels), motion, side="right").astype(np.int64)


def place_weights(clip: np.ndarray, motion_weight: float, without: int = 0) -> np.ndarray:
    """Return loss weights of the places of latents `[F, C, Y, X]`: `[F, 1, Y, X]`, greater where they move, mean 1.

    Args:
        without: number of first frames whose weight is then set to 0.
    """
    change = np.abs(np.diff(clip, axis=0, prepend=clip[:1])).mean(1, keepdims=True)
    weights = 1 + motion_weight * change / max(float(change.mean()), 1e-6)
    weights /= weights.mean()
    weights[:without] = 0
    return weights.astype(np.float32)


@dataclass(frozen=True)
class ClipBatch:
    """Clips of a step.

    Attributes:
        clean: latents float32 `[B, F, C, Y, X]`. weights: loss weight of each place, `[B, F, 1, Y, X]`, mean about 1.
        texts: captions. motion: int64 `[B]`, levels; the last one means any.
    """

    clean: Tensor
    weights: Tensor
    texts: list[str]
    motion: Tensor


class ClipBatches:
    """Training clips as a function of (seed, step).

    Clips start at their first frame, so that a caption describes how a video starts. Some loops start at another block, whose
    loss weight is 0: this is how a model learns what follows the last block.

    Args:
        after_image: whether all clips follow a block that repeats their first frame, whose loss weight is 0, instead.
    """

    def __init__(
        self,
        data: VideoDataset,
        latents: np.ndarray,
        config: VideoConfig | LoRAConfig,
        block: int,
        levels: int,
        device: torch.device,
        after_image: bool = False,
    ):
        self.data, self.latents, self.config, self.block, self.device = data, latents, config, block, device
        self.after_image = after_image
        indices = data.indices("train")
        self.sample = WeightedIndices(indices, motion_weights([data.records[i] for i in indices]))
        self.levels, self.level_of_clip = levels, motion_levels(data, levels)

    def __call__(self, step: int) -> ClipBatch:
        config, F, still = self.config, self.latents.shape[1], self.after_image
        rng = np.random.default_rng((config.seed, step))
        words = random.Random(config.seed * 1_000_003 + step)
        clips, weights, texts, motion = [], [], [], []
        for index in self.sample(rng.random(config.batch_size)):
            record = self.data.records[index]
            shifted = not still and record["loops"] and rng.random() < config.loop_shift_probability
            start = int(rng.integers(1, F // self.block)) * self.block if shifted else 0
            frames = window_frames(record, F, start, F)
            clip = self.latents[index][np.r_[[0] * self.block, frames[: -self.block]] if still else frames].astype(np.float32)
            clips.append(clip)
            weights.append(place_weights(clip, config.motion_weight, self.block if shifted or still else 0))
            texts.append(EMPTY_CAPTION if words.random() < config.caption_dropout else sample_caption(record, words))
            labeled = rng.random() < config.motion_label_probability
            motion.append(int(self.level_of_clip[index]) if labeled else self.levels)
        clean, places = (torch.from_numpy(np.stack(parts)).to(self.device) for parts in (clips, weights))
        return ClipBatch(clean, places, texts, torch.tensor(motion, device=self.device))


class PreparedAhead:
    """Computes the batch of the next step on another thread while a step runs. `batches` is a function of the step."""

    def __init__(self, batches: Callable[[int], ClipBatch]):
        self.batches = batches
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prepare-batch")
        self._ahead: tuple[int, Future[ClipBatch]] | None = None

    def __call__(self, step: int) -> ClipBatch:
        number, ahead = self._ahead or (None, None)
        batch = ahead.result() if ahead is not None and number == step else self.batches(step)
        self._ahead = step + 1, self._pool.submit(self.batches, step + 1)
        return batch


def encode_captions(
    model: CausalVideoTransformer, bank: CaptionBank, texts: Sequence[str], motion: Tensor | None = None
) -> TextCache:
    """Return the model's text cache of captions."""
    condition = bank(texts)
    assert condition.caption_embeds is not None
    return model.text_cache(condition.caption_embeds, condition.caption_mask, motion if model.config.motion_levels else None)

"""Training clips of still images that move, with captions that name the motion: see `motions`.

Clips are rendered and encoded when they are needed, so that no two are alike.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.captions import can_recolor, noun_and_article, style_phrase
from recipes.emoji.dataset import EmojiDataset
from recipes.emoji_video.autoencoder import to_video
from recipes.emoji_video.batches import EMPTY_CAPTION, ClipBatch, ClipBatches, motion_borders, place_weights
from recipes.emoji_video.clips import VideoDataset
from recipes.emoji_video.motions import MOTIONS, SPEEDS, Motion, is_held_out_motion, motion_caption, render, rest
from vargen.device import preferred_dtype
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.augment import HUE_NAMES, HUES, WeightedIndices, dominant_hue, find_color_word, recolor_caption, rotate_hue

if TYPE_CHECKING:
    from recipes.emoji_video.lora import LoRAConfig

_STYLE_NAMED = 0.4
_RECOLORED = 0.15
_SIZES = 0.68, 0.8  # of an image at rest, relative to the frame: there is room to move
_STEPS_PER_STILL = (
    2  # steps in which moving stills are used, with other noise, because rendering and encoding them takes a third of a step
)
_START_CANDIDATES = 4  # number of generated images of which a video starts from the best one


def start_settings(block: int) -> dict[str, Any]:
    """Return the settings of a model with a LoRA for start images, as in `vargen.adapters.video_settings`."""
    motions = [phrase for motion in MOTIONS.values() for phrase in (motion.participle, motion.verb)]
    images = {"image_model": "emoji", "image_frames": block, "image_candidates": _START_CANDIDATES}
    images["image_scale"] = sum(_SIZES) / 2
    return {"image": True, **images, "motions": motions}


class MovingStills:
    """Renders clips of moving stills, and their captions, as a function of a seed.

    Args:
        frames, side: of a clip. start: how many of the frames show the image at rest, before it moves.
    """

    def __init__(self, stills: EmojiDataset, config: LoRAConfig, frames: int, side: int, start: int):
        self.stills, self.frames, self.side, self.start = stills, frames, side, start
        indices = stills.training_indices()
        weights = config.still_weights.weights([stills.records[i] for i in indices])
        self.sample = WeightedIndices(indices, weights)
        self.images: dict[int, np.ndarray] = {}

    def render_clip(self, index: int, motion: Motion, rng: random.Random) -> tuple[np.ndarray, str]:
        """Return a clip, uint8 `[F, side, side, 3]`, and a caption of it."""
        record = self.stills.records[index]
        image = self.images.setdefault(index, np.asarray(self.stills.images[index]))
        noun, article = noun_and_article(record)
        if rng.random() < _RECOLORED and can_recolor(record) and (hue := dominant_hue(image)) is not None:
            old, new = find_color_word(hue), rng.choice(HUE_NAMES)
            if changed := recolor_caption(noun, old, new):
                image = rotate_hue(image, HUES[new] - hue) if new != old else image
                noun, article = changed, article and ("an" if new == "orange" else "a")
        if rng.random() < _STYLE_NAMED:
            noun = f"{noun}, {style_phrase(record['style'])}"
        speed, size = rng.randrange(len(SPEEDS)), rng.uniform(*_SIZES)
        clip = render(image, motion.poses(self.frames, motion.rates[speed], size), self.side)
        resting = render(image, rest(size), self.side)
        clip = np.concatenate([resting.repeat(self.start, 0), clip[: -self.start]])
        return clip, motion_caption(motion, noun, article, SPEEDS[speed], rng)

    def examples(self, seed: int, count: int) -> list[tuple[np.ndarray, str]]:
        """Return `count` clips with captions of training combinations."""
        rng = random.Random(seed)
        points = np.random.default_rng(seed).random(count)
        found = []
        for index in self.sample(points).tolist():
            concept = self.stills.records[index]["concept"]
            allowed = [motion for name, motion in MOTIONS.items() if not is_held_out_motion(concept, name)]
            found.append(self.render_clip(index, rng.choice(allowed), rng))
        return found


class MixedBatches:
    """Batches of animated clips and moving stills, as a function of (seed, step).

    The first block of each shows the image at rest and has no loss. So a video learns what moves from an image, not from the
    caption; this takes a fraction of the steps, and works for images that training never shows.
    """

    def __init__(
        self,
        data: VideoDataset,
        stills: EmojiDataset,
        latents: np.ndarray,
        vae: CausalVideoVAE,
        config: LoRAConfig,
        block: int,
        levels: int,
        device: torch.device,
    ):
        self.count = round(config.still_fraction * config.batch_size)
        animated = replace(config, batch_size=config.batch_size - self.count)
        self.animated = ClipBatches(data, latents, animated, block, levels, device, after_image=True)
        self.start = block
        self.stills = MovingStills(stills, config, *data.frames.shape[1:3], self.start)
        self.vae, self.config, self.levels, self.device = vae, config, levels, device
        self.borders = motion_borders(data, levels)
        self._moved: tuple[int, ClipBatch] | None = None

    def __call__(self, step: int) -> ClipBatch:
        number = step // _STEPS_PER_STILL
        if self._moved is None or self._moved[0] != number:
            self._moved = number, self.moved(number)
        one, other = self.animated(step), self._moved[1]
        clean, weights, motion = (
            torch.cat([getattr(each, name) for each in (one, other)]) for name in ("clean", "weights", "motion")
        )
        return ClipBatch(clean, weights, one.texts + other.texts, motion)

    def moved(self, number: int) -> ClipBatch:
        """Return the batch with this number of moving stills."""
        config = self.config
        words = random.Random(f"{config.seed} {number}")
        clips, texts = zip(*self.stills.examples(config.seed * 1_000_003 + number, self.count), strict=True)
        clean = encode(self.vae, np.stack(clips), self.device)
        weights = np.stack([place_weights(clip, config.motion_weight, self.start) for clip in clean.cpu().numpy()])
        motions = [np.abs(np.diff(clip[self.start :].astype(np.float32), axis=0)).mean() for clip in clips]
        known = [words.random() < config.motion_label_probability for _ in clips]
        motion = np.where(known, np.searchsorted(self.borders, motions, side="right"), self.levels)
        named = [EMPTY_CAPTION if words.random() < config.caption_dropout else text for text in texts]
        places, levels = torch.from_numpy(weights).to(self.device), torch.from_numpy(motion).to(self.device)
        return ClipBatch(clean, places, named, levels)


@torch.no_grad()
def encode(vae: CausalVideoVAE, clips: np.ndarray, device: torch.device) -> Tensor:
    """Return the latents, float32 `[N, F, C, Y, X]`, of uint8 clips."""
    with torch.autocast(device.type, torch.bfloat16, enabled=preferred_dtype(device) == torch.bfloat16):
        return vae.encode(to_video(clips, device)).float()

"""Image variants (shifted, mirrored, recolored) with matching captions, and what an encoder computes from them.

Generators of both families train on these: the tokens or latents of each variant are computed once and stored.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vargen.device import preferred_dtype
from vargen.training.augment import (
    HUE_NAMES,
    HUES,
    AugmentationConfig,
    WeightedIndices,
    dominant_hue,
    find_color_word,
    recolor_caption,
    rotate_hue,
    shift_images,
)
from vargen.training.dataset import CaptionedImages, to_pixels

_MENTIONS_COLOR = 0.1  # probability of adding the image's own dominant color to a caption
_PART = 64  # images per encoder batch


class EncodedVariants:
    """Encoder outputs of image variants, computed on first use and stored on disk: `[N, variants, *shape]`.

    Variant 0 is the image itself; then come copies shifted by a fixed list of offsets, then one in each of `HUE_NAMES`,
    then, if the config mirrors images, the mirror images of the image and of its shifted copies. The file is memory-mapped and
    sparse: entries that were never requested take no space. Its name identifies the inputs. Values are written in order and the
    last part of a written entry is never all zero, so an entry whose last part is zero is not computed yet, even if the run was
    killed while writing it.

    Args:
        encoder_hash: identifies the encoder in the file's name. shape, dtype: of the output of `encode` for one image.

    Attributes:
        fast: whether encoding may run in bfloat16.
    """

    fast: ClassVar[bool] = True

    def __init__(
        self, folder: Path, kind: str, encoder_hash: str, images: np.ndarray, config: AugmentationConfig, device: torch.device,
        shape: tuple[int, ...], dtype: type[np.generic],
    ):  # fmt: skip
        self.images, self.device = images, device
        limit = config.shift_pixels
        shifts = np.random.default_rng(config.seed).integers(-limit, limit + 1, (config.shift_variants, 2))
        self.offsets = [(0, 0), *map(tuple, shifts.tolist())]
        self.first_flipped = len(self.offsets) + len(HUE_NAMES)  # index of the first mirror image
        variants = self.first_flipped + (len(self.offsets) if config.flip_probability else 0)
        whole = (len(images), variants, *shape)
        flipped = "-mirrored" if config.flip_probability else ""
        path = folder / f"{kind}-{encoder_hash}-{config.seed}-{limit}-{config.shift_variants}{flipped}.npy"
        folder.mkdir(parents=True, exist_ok=True)
        exists = path.is_file() and path.stat().st_size > np.prod(whole) * np.dtype(dtype).itemsize
        mode = "r+" if exists else "w+"
        try:
            self.array = np.lib.format.open_memmap(path, mode=mode, dtype=dtype, shape=None if exists else whole)
        except ValueError as error:
            raise ValueError(f"{path} is damaged or was not written by vargen ({error}); remove it") from None
        if self.array.shape != whole or self.array.dtype != dtype:
            raise ValueError(
                f"{path} is damaged or was not written by vargen ({self.array.dtype}{list(self.array.shape)}); remove it"
            )
        self.hues: dict[int, float | None] = {}

    def hue(self, i: int) -> float | None:
        """Return the dominant hue of image i in degrees, if it has one."""
        if i not in self.hues:
            self.hues[i] = dominant_hue(np.asarray(self.images[i]))
        return self.hues[i]

    def image(self, i: int, variant: int) -> np.ndarray:
        """Return the variant of image i, uint8 `[Y, X, 3]`.

        Raises:
            ValueError: for a color variant of an image without a dominant hue.
        """
        image = np.asarray(self.images[i])
        if variant >= self.first_flipped:
            image, variant = image[:, ::-1], variant - self.first_flipped
        if variant < len(self.offsets):
            return shift_images(image[None], *self.offsets[variant])[0]
        hue = self.hue(i)
        if hue is None:
            raise ValueError(f"image {i} has no dominant color, which a color variant needs")
        return rotate_hue(image, HUES[HUE_NAMES[variant - len(self.offsets)]] - hue)

    def encode(self, pixels_BCYX: Tensor) -> np.ndarray:
        """Encode images in [-1, 1] for storage, under autocast where bfloat16 is fast; defined by subclasses."""
        raise NotImplementedError

    @torch.no_grad()
    def load(self, indices: Sequence[int], variants: Sequence[int]) -> np.ndarray:
        """Return the outputs `[B, *shape]` of images at variants."""
        pairs = list(zip(indices, variants, strict=True))
        missing = [pair for pair in dict.fromkeys(pairs) if not self.array[pair][-1].any()]
        enabled = self.fast and preferred_dtype(self.device) == torch.bfloat16
        amp = torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)
        for start in range(0, len(missing), _PART):
            pairs_ = missing[start : start + _PART]
            with amp:
                made = self.encode(to_pixels(np.stack([self.image(*pair) for pair in pairs_]), self.device))
            for pair, row in zip(pairs_, made, strict=True):
                self.array[pair] = row
        return np.stack([self.array[pair] for pair in pairs])


class AugmentedBatches:
    """Samples the images, variants and captions of each step, as a function of (seed, step)."""

    def __init__(self, data: CaptionedImages, store: EncodedVariants, config: AugmentationConfig):
        self.data, self.store, self.config = data, store, config
        training = data.training_indices()
        self.sample = WeightedIndices(training, config.sampling_weights.weights([data.records[i] for i in training]))

    def __call__(self, step: int, count: int, stream: int = 0) -> tuple[list[int], list[int], list[str], Tensor]:
        """Return indices of images, their variants, their captions, and which captions are dropped, bool `[count]`.

        Args:
            stream: distinguishes several batches of one step.
        """
        rng = np.random.default_rng((self.config.seed, step, stream))
        words = random.Random(f"{self.config.seed} {step} {stream}")
        # Stratified: one sample from each of `count` equal parts of the data, so that a batch is never all flags.
        points = (np.arange(count) + rng.random(count)) / count
        indices = self.sample(points).tolist()
        texts, variants = zip(*[self._variant(i, words) for i in indices], strict=True)
        dropped = torch.from_numpy(rng.random(count) < self.config.caption_dropout)
        return indices, list(variants), list(texts), dropped

    def _variant(self, i: int, rng: random.Random) -> tuple[str, int]:
        """Sample a caption of image i and a variant that matches it."""
        text = self.data.sample_caption(i, rng)
        variant, uniform = rng.randrange(len(self.store.offsets)), rng.random()
        if self.config.flip_probability and self.data.can_flip(i) and rng.random() < self.config.flip_probability:
            variant += self.store.first_flipped
        if uniform >= self.config.recolor_probability + _MENTIONS_COLOR or not self.data.can_recolor(i):
            return text, variant
        hue = self.store.hue(i)
        if hue is None:
            return text, variant
        old = find_color_word(hue)
        if uniform >= self.config.recolor_probability:
            return recolor_caption(text, old, old) or text, variant
        new = rng.choice([color for color in HUE_NAMES if color != old])
        changed = recolor_caption(text, old, new)
        return (changed, len(self.store.offsets) + HUE_NAMES.index(new)) if changed else (text, variant)

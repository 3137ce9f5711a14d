"""Image variants (shifted, mirrored, recolored) with matching captions, and what an encoder computes from them.

Generators of both families train on these: the tokens or latents of each variant are computed once and stored.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from vargen.device import preferred_dtype
from vargen.training.dataset import CaptionedImages, to_pixels
from vargen.training.focus import Focus
from vargen.training.recolor import COLOURS, HUES, color_of_hue, dominant_hue, recolor_caption, turned

_SAYS_ITS_COLOUR = 0.1  # probability of adding the image's own dominant color to a caption
_PART = 64  # images per encoder batch


class AugmentationConfig(Protocol):
    """The fields of a config that control augmentation."""

    @property
    def focus(self) -> Focus: ...
    @property
    def seed(self) -> int: ...
    @property
    def caption_dropout(self) -> float: ...
    @property
    def shift_pixels(self) -> int: ...
    @property
    def shift_variants(self) -> int: ...
    @property
    def mirrored(self) -> float: ...
    @property
    def recoloured(self) -> float: ...


def shifted(pictures: np.ndarray, dy: int, dx: int) -> np.ndarray:
    """Shift uint8 images `[B, Y, X, 3]` by (dy, dx) pixels and fill with white."""
    moved = np.full_like(pictures, 255)
    Y, X = pictures.shape[1:3]
    moved[:, max(dy, 0) : Y + min(dy, 0), max(dx, 0) : X + min(dx, 0)] = pictures[
        :, max(-dy, 0) : Y + min(-dy, 0), max(-dx, 0) : X + min(-dx, 0)
    ]
    return moved


class VariantStore:
    """Encoder outputs of image variants, computed on first use and stored on disk: `[N, variants, *shape]`.

    Variant 0 is the image itself; then come copies shifted by a fixed list of offsets, then one in each of `COLOURS`, then, if
    the config mirrors images, the mirror images of the image and of its shifted copies. The file is memory-mapped and sparse:
    entries that were never requested take no space. Its name identifies the inputs. Values are written in order and the last
    part of a written entry is never all zero, so an entry whose last part is zero is not computed yet, however the run was
    killed.

    Args:
        made_of: identifies the encoder in the file's name. shape, dtype: of the output of `encode` for one image.

    Attributes:
        fast: whether encoding may run in bfloat16.
    """

    fast: ClassVar[bool] = True

    def __init__(
        self, folder: Path, kind: str, made_of: str, images: np.ndarray, recipe: AugmentationConfig, device: torch.device,
        shape: tuple[int, ...], dtype: type[np.generic],
    ):  # fmt: skip
        self.images, self.device = images, device
        limit = recipe.shift_pixels
        drawn = np.random.default_rng(recipe.seed).integers(-limit, limit + 1, (recipe.shift_variants, 2))
        self.offsets = [(0, 0), *map(tuple, drawn.tolist())]
        self.mirrored = len(self.offsets) + len(COLOURS)  # index of the first mirror image
        variants = self.mirrored + (len(self.offsets) if recipe.mirrored else 0)
        whole = (len(images), variants, *shape)
        name = f"{kind}-{made_of}-{recipe.seed}-{limit}-{recipe.shift_variants}{'-mirrored' if recipe.mirrored else ''}.npy"
        path = folder / name
        folder.mkdir(parents=True, exist_ok=True)
        there = path.is_file() and path.stat().st_size > np.prod(whole) * np.dtype(dtype).itemsize
        mode = "r+" if there else "w+"
        try:
            self.kept = np.lib.format.open_memmap(path, mode=mode, dtype=dtype, shape=None if there else whole)
        except ValueError as error:
            raise ValueError(f"{path} is damaged or not of vargen's ({error}); remove it") from None
        if self.kept.shape != whole or self.kept.dtype != dtype:
            raise ValueError(f"{path} is damaged or not of vargen's ({self.kept.dtype}{list(self.kept.shape)}); remove it")
        self.hues: dict[int, float | None] = {}

    def hue(self, i: int) -> float | None:
        """Return the dominant hue of image i in degrees, if it has one."""
        if i not in self.hues:
            self.hues[i] = dominant_hue(np.asarray(self.images[i]))
        return self.hues[i]

    def picture(self, i: int, variant: int) -> np.ndarray:
        """Return the variant of image i, uint8 `[Y, X, 3]`.

        Raises:
            ValueError: for a color variant of an image without a dominant hue.
        """
        picture = np.asarray(self.images[i])
        if variant >= self.mirrored:
            picture, variant = picture[:, ::-1], variant - self.mirrored
        if variant < len(self.offsets):
            return shifted(picture[None], *self.offsets[variant])[0]
        hue = self.hue(i)
        if hue is None:
            raise ValueError(f"picture {i} has no dominant colour that could become another")
        return turned(picture, HUES[COLOURS[variant - len(self.offsets)]] - hue)

    def encode(self, pixels_BCYX: Tensor) -> np.ndarray:
        """Encode images in [-1, 1] for storage, under autocast where bfloat16 is fast; defined by subclasses."""
        raise NotImplementedError

    @torch.no_grad()
    def rows(self, indices: Sequence[int], variants: Sequence[int]) -> np.ndarray:
        """Return the outputs `[B, *shape]` of images at variants."""
        pairs = list(zip(indices, variants, strict=True))
        wanted = [pair for pair in dict.fromkeys(pairs) if not self.kept[pair][-1].any()]
        enabled = self.fast and preferred_dtype(self.device) == torch.bfloat16
        amp = torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)
        for start in range(0, len(wanted), _PART):
            part = wanted[start : start + _PART]
            with amp:
                made = self.encode(to_pixels(np.stack([self.picture(*pair) for pair in part]), self.device))
            for pair, row in zip(part, made, strict=True):
                self.kept[pair] = row
        return np.stack([self.kept[pair] for pair in pairs])


class Looks:
    """Samples the images, variants and captions of each step, as a function of (seed, step)."""

    def __init__(self, data: CaptionedImages, store: VariantStore, recipe: AugmentationConfig):
        self.data, self.store, self.recipe = data, store, recipe
        self.indices = data.training_indices()
        self.cumulative = np.cumsum(recipe.focus.weights([data.records[i] for i in self.indices]))

    def __call__(self, step: int, count: int, stream: int = 0) -> tuple[list[int], list[int], list[str], Tensor]:
        """Return indices of images, their variants, their captions, and which captions are dropped, bool `[count]`.

        Args:
            stream: distinguishes several batches of one step.
        """
        draw = np.random.default_rng((self.recipe.seed, step, stream))
        words = random.Random(f"{self.recipe.seed} {step} {stream}")
        # Stratified: one sample from each of `count` equal parts of the data, so that a batch is never all flags.
        points = (np.arange(count) + draw.random(count)) / count
        chosen = self.indices[np.searchsorted(self.cumulative, points, side="right").clip(max=len(self.indices) - 1)].tolist()
        texts, variants = zip(*[self._variant(i, words) for i in chosen], strict=True)
        dropped = torch.from_numpy(draw.random(count) < self.recipe.caption_dropout)
        return chosen, list(variants), list(texts), dropped

    def _variant(self, i: int, words: random.Random) -> tuple[str, int]:
        """Sample a caption of image i and a variant that matches it."""
        text = self.data.sample_caption(i, words)
        variant, chance = words.randrange(len(self.store.offsets)), words.random()
        if self.recipe.mirrored and self.data.can_flip(i) and words.random() < self.recipe.mirrored:
            variant += self.store.mirrored
        if chance >= self.recipe.recoloured + _SAYS_ITS_COLOUR or not self.data.can_recolor(i):
            return text, variant
        hue = self.store.hue(i)
        if hue is None:
            return text, variant
        own = color_of_hue(hue)
        if chance >= self.recipe.recoloured:
            return recolor_caption(text, own, own) or text, variant
        new = words.choice([colour for colour in COLOURS if colour != own])
        changed = recolor_caption(text, own, new)
        return (changed, len(self.store.offsets) + COLOURS.index(new)) if changed else (text, variant)

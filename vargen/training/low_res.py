"""Low-resolution images of a data set: the training data of a low-resolution generator, and the input of an upsampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.tokenizers.vq import VQModel
from vargen.training.blanks import BlankAware, tokens_digest
from vargen.training.config import NextTokenConfig
from vargen.training.dataset import CaptionedImages
from vargen.training.next_token import ImageMetrics, train_next_token
from vargen.training.variants import AugmentationConfig, VariantStore

_AT_ONCE = 512


def downscale(pixels_BCYX: Tensor, factor: int) -> Tensor:
    """Average each block of `factor` x `factor` pixels."""
    return F.avg_pool2d(pixels_BCYX, factor)


def downscale_dataset(data: CaptionedImages, recipe: NextTokenConfig, downsampling: int) -> CaptionedImages:
    """Downscale the images to the grid of the config, for a tokenizer with one token per `downsampling` pixels.

    Raises:
        ValueError: if the grid's side in pixels does not divide the side of the images.
    """
    side, wanted = data.images.shape[1], recipe.model["grid_size"] * downsampling
    if wanted > side or side % wanted:
        raise ValueError(f"grid_size {recipe.model['grid_size']} is {wanted} pixels, which must divide the pictures' {side}")
    if wanted == side:
        return data
    small = np.empty((len(data.images), wanted, wanted, 3), np.uint8)
    for start in range(0, len(small), _AT_ONCE):
        part = torch.from_numpy(np.asarray(data.images[start : start + _AT_ONCE])).movedim(-1, 1).float()
        small[start : start + _AT_ONCE] = downscale(part, side // wanted).round().to(torch.uint8).movedim(1, -1).numpy()
    return replace(data, images=small)


class TokenPairs(VariantStore):
    """Image tokens at both resolutions, `[images, variants, n + N]`, stored plus 1: zero means not computed yet."""

    fast = False

    def __init__(
        self, folder: Path, images: np.ndarray, vqvae: VQModel, recipe: AugmentationConfig, device: torch.device, factor: int
    ):
        self.vqvae, self.factor = vqvae.eval(), factor
        self.tokens_of = BlankAware(vqvae)
        side = images.shape[1] // vqvae.downsampling
        self.low = side // factor
        dtype = np.uint16 if vqvae.config.codebook_size < 2**16 - 1 else np.uint32
        count = self.low**2 + side**2
        super().__init__(folder, f"pairs-{factor}", tokens_digest(vqvae), images, recipe, device, (count,), dtype)

    def encode(self, pixels_BCYX: Tensor) -> np.ndarray:
        levels = ((downscale(pixels_BCYX, self.factor) + 1) * 127.5).round() / 127.5 - 1  # rounded like stored images
        parts = self.tokens_of(levels), self.tokens_of(pixels_BCYX)
        return torch.cat(parts, dim=1).cpu().numpy() + 1

    def __call__(self, indices: Sequence[int], variants: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the tokens at both resolutions, int64 `[B, r, c]` and `[B, N]`."""
        rows = torch.from_numpy(self.rows(indices, variants).astype(np.int64) - 1).to(self.device)
        low, high = rows.split([self.low**2, rows.shape[1] - self.low**2], dim=1)
        return low.unflatten(1, (self.low, self.low)), high


def train_low_res(
    recipe: NextTokenConfig,
    data: CaptionedImages,
    tokenizer_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
    init_folder: Path | None = None,
    image_metrics: ImageMetrics | None = None,
) -> dict[str, float]:
    """Run `train_next_token` on images at the resolution of the config's grid, with the same arguments and results."""
    downsampling = VQModel.from_pretrained(tokenizer_folder).downsampling
    small = downscale_dataset(data, recipe, downsampling)
    return train_next_token(recipe, small, tokenizer_folder, text_encoder_folder, folder, device, init_folder, image_metrics)

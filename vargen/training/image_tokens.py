"""Tokens of training images, computed once at the resolution of a grid and stored in the folder of the run.

Shape suffixes: B images, N tokens in raster order, C channels, Y/X pixels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from vargen.files import atomic_file
from vargen.models.tokenizers.vq import VQModel
from vargen.training.dataset import to_pixels
from vargen.weight_files import weights_digest

_AT_ONCE = 16  # images
_WHITE = 0.98  # in [-1, 1]; a patch is blank if none of its values is lower


def hash_tokens(vqvae: VQModel) -> str:
    """Return an identifier of the tokens of a tokenizer: of its encoder, codebook and code of blank patches."""
    code = vqvae.config.blank_code
    digest = weights_digest(vqvae.encoder, vqvae.quant_conv, vqvae.quantize)
    return f"{digest}-blank{'' if code is None else code}"


@torch.no_grad()
def encode_images(vqvae: VQModel, pixels_BCYX: Tensor) -> Tensor:
    """Encode images in [-1, 1] as int64 `[B, N]`; if the tokenizer has a `blank_code`, all blank patches get it.

    An encoder with a global receptive field gives each white patch a code that depends on the rest of the image. The first
    tokens then identify the image, and a model memorizes images by them instead of reading the caption.
    """
    tokens = vqvae.encode(pixels_BCYX).flatten(1)
    if vqvae.config.blank_code is None:
        return tokens
    lowest = -F.max_pool2d(-pixels_BCYX.float().amin(1, keepdim=True), vqvae.downsampling)
    return tokens.masked_fill(lowest.flatten(1) >= _WHITE, vqvae.config.blank_code)


def downscale(pixels_BCYX: Tensor, side: int) -> Tensor:
    """Average blocks of pixels of images in [-1, 1] to `side` pixels, rounded to the 256 values of stored images."""
    factor = pixels_BCYX.shape[-1] // side
    if factor == 1:
        return pixels_BCYX
    return ((F.avg_pool2d(pixels_BCYX, factor) + 1) * 127.5).round() / 127.5 - 1


def load_or_encode(folder: Path, images: np.ndarray, vqvae: VQModel, grid: int) -> np.ndarray:
    """Return the tokens of images at the resolution of a grid, int32 `[images, grid * grid]`.

    They are stored in `folder`, so that a resumed run reads them.

    Args:
        images: uint8 `[N, Y, X, 3]`. vqvae: the tokenizer, on the device that encodes. grid: tokens per side.
    """
    side, full = grid * vqvae.downsampling, images.shape[1]
    if side > full or full % side:
        raise ValueError(f"a grid of {grid} tokens has {side} pixels, which must divide the {full} pixels of the images")
    path = folder / f"tokens-{grid}-{hash_tokens(vqvae)}.npy"
    if path.is_file():
        stored = np.load(path, allow_pickle=False)
        if stored.shape == (len(images), grid * grid):
            return stored
    parts = []
    for start in tqdm(range(0, len(images), _AT_ONCE), desc="tokens", disable=None, mininterval=5):
        pixels = to_pixels(images[start : start + _AT_ONCE], vqvae.device)
        parts.append(encode_images(vqvae, downscale(pixels, side)).to(torch.int32).cpu().numpy())
    tokens = np.concatenate(parts)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        np.save(file, tokens)
    return tokens

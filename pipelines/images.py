"""Decoding tokens to pixels, preprocessing input images, and the source and mask of variations and inpainting."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vargen.models.tokenizers.multi_scale_quantizer import MultiScaleQuantizer
from vargen.reading import on_white
from vargen.values import parse_float, short_repr

logger = logging.getLogger("vargen")


def decoded_pixels(decode: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Decode tokens to pixels, float32 `[B, 3, Y, X]`. Splits the batch in two on out-of-memory, so that no tokens are lost.

    Raises:
        torch.OutOfMemoryError: if a single image does not fit.
    """
    try:
        return decode(tokens).float()
    except torch.OutOfMemoryError as error:
        if len(tokens) == 1:
            raise torch.OutOfMemoryError(
                "out of memory decoding the pixels of one image; output_type='latent' returns its tokens"
            ) from error
    logger.warning("out of memory decoding %d images at once: decoding them in two halves", len(tokens))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return torch.cat([decoded_pixels(decode, half) for half in tokens.tensor_split(2)])


def preprocess_images(images: Any, processor: Any, side: int, name: str = "images") -> Tensor:
    """Convert images to float32 `[B, 3, side, side]` in [-1, 1], and resize them.

    Args:
        images: PIL images, a tensor `[B, 3, Y, X]` or an array `[B, Y, X, 3]`; floating-point numbers in [0, 1], or uint8.
        name: name of the argument in error messages.

    Raises:
        ValueError, TypeError: if it is not an image, or has another dtype or values outside [0, 1], including NaN.
    """
    if not isinstance(images, Tensor | np.ndarray):
        images = list(images) if isinstance(images, list | tuple) else [images]
        if not images or not all(isinstance(image, Image.Image) for image in images):
            raise TypeError(f"{name} must be PIL images, or a float tensor [B, 3, Y, X] in [0, 1], got {short_repr(images)}")
        images = [on_white(image) for image in images]
    elif images.ndim not in (3, 4) or 0 in images.shape:
        raise ValueError(f"{name} must be [B, 3, Y, X] as a tensor, [B, Y, X, 3] as an array, got {list(images.shape)}")
    else:
        images = _unit(images, name)
    pixels: Tensor = processor.preprocess(images, height=side, width=side)
    return pixels


def _unit(images: Any, name: str) -> Any:
    """Convert a tensor or array to float32 in [0, 1]."""
    numbers, array = torch.as_tensor(images), isinstance(images, np.ndarray)
    if numbers.dtype == torch.uint8:
        numbers = numbers.float() / 255
    if not numbers.is_floating_point():
        raise TypeError(f"{name} must hold floating-point numbers from 0 to 1, or uint8 from 0 to 255, got {images.dtype}")
    low, high = (float(edge) for edge in numbers.float().aminmax())
    if not (low >= 0 and high <= 1):  # negated so that NaN is rejected
        raise ValueError(f"{name} must hold numbers from 0 to 1, or be uint8 from 0 to 255, got {low:g} to {high:g}")
    return numbers.float().numpy() if array else numbers.float()


VARIATION, INPAINTING = 0.8, 1.0  # default strength without and with a mask
_HALF = 0.5  # threshold of mask values, and of the kept fraction of a token's area


@dataclass(frozen=True)
class Source:
    """Source image of a variation or of inpainting.

    Attributes:
        pixels: float32 `[N, 3, Y, X]` in [-1, 1].
        mask: bool `[M, 1, Y, X]`, M is 1 or N; True in the area to regenerate. None: the whole image.
        strength: fraction of the scales to regenerate, in [0, 1].
    """

    pixels: Tensor
    mask: Tensor | None
    strength: float

    def kept_scales(self, scales: int) -> int:
        """Number of coarse scales kept from the source image. Any strength above 0 regenerates at least the finest scale."""
        return scales - math.ceil(round(self.strength * scales, 6))


def check_source(image: Any, mask: Any, strength: Any, side: int, processor: Any) -> Source | None:
    """Validate the `image`, `mask` and `strength` of a call. Returns None if there is no image.

    Args:
        side: width and height of the model's images in pixels.

    Raises:
        ValueError, TypeError: for a mask or a strength without an image, a strength outside [0, 1], an image that does not have
            the model's size, or a mask that does not have the image's size.
    """
    if image is None:
        for name, value in (("mask", mask), ("strength", strength)):
            if value is not None:
                raise ValueError(f"{name} says what to do with an image, and none is given: pass image")
        return None
    share = parse_float(strength) if strength is not None else INPAINTING if mask is not None else VARIATION
    if share is None or not 0 <= share <= 1:
        raise ValueError(f"strength must be from 0 (keep the image) to 1 (draw all of it anew), got {short_repr(strength)}")
    for width, height in _sizes(image):
        if (width, height) != (side, side):
            raise ValueError(
                f"image must be {side}x{side} pixels, the size that this model draws, got {width}x{height}; crop or resize it"
            )
    pixels = preprocess_images(image, processor, side, "image")
    return Source(pixels, None if mask is None else _mask(mask, len(pixels), side), share)


def _sizes(image: Any) -> set[tuple[int, int]]:
    """Return the sizes (width, height) of the images; empty for other objects, which `preprocess_images` rejects."""
    if isinstance(image, Tensor) and image.ndim in (3, 4):
        return {(image.shape[-1], image.shape[-2])}
    if isinstance(image, np.ndarray) and image.ndim in (3, 4):
        return {(image.shape[-2], image.shape[-3])}
    listed = image if isinstance(image, list | tuple) else [image]
    return {each.size for each in listed if isinstance(each, Image.Image)}


def _mask(mask: Any, images: int, side: int) -> Tensor:
    """Convert a mask to bool `[M, 1, Y, X]`, True where white."""
    allowed = "a PIL image, a list of them, or numbers from 0 (keep) to 1 (draw anew) [Y, X] or [N, 1, Y, X]"
    if isinstance(mask, Tensor | np.ndarray):
        values = torch.as_tensor(mask).float()
        if values.ndim not in (2, 3, 4) or (values.ndim == 4 and values.shape[1] != 1):
            raise ValueError(f"mask must be {allowed}, got {list(values.shape)}")
        values = values.reshape(-1, 1, *values.shape[-2:])
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"mask must be {allowed}, got other numbers")
    else:
        listed = list(mask) if isinstance(mask, list | tuple) else [mask]
        if not listed or not all(isinstance(each, Image.Image) for each in listed):
            raise TypeError(f"mask must be {allowed}, got {short_repr(mask)}")
        for each in listed:
            if each.size != (side, side):
                raise ValueError(f"mask must be {side}x{side} pixels, as the image is, got {each.width}x{each.height}")
        arrays = [np.array(each.convert("L"), dtype=np.float32) / 255 for each in listed]
        values = torch.from_numpy(np.stack(arrays))[:, None]
    if values.shape[-2:] != (side, side):
        raise ValueError(f"mask must be {side}x{side} pixels, as the image is, got {values.shape[-1]}x{values.shape[-2]}")
    if len(values) not in (1, images):
        raise ValueError(f"mask must be one, or one for each of {images} images, got {len(values)}")
    return values >= _HALF


class Kept:
    """Chooses the tokens of the kept (unmasked) area at each scale of a next-scale loop.

    It quantizes the difference between the source image's latent and the latent generated so far, instead of the source image
    itself, because coarse generated tokens overlap the kept area and their error must be corrected at finer scales.

    Args:
        quantiser: quantizer of the image tokenizer.
        latent: float `[B, C, R, G]`, latents of the source images before quantization.
        mask: bool `[B, 1, Y, X]`, True in the area to regenerate. A latent cell is kept if none of its pixels is masked.
    """

    def __init__(self, quantiser: MultiScaleQuantizer, latent: Tensor, mask: Tensor):
        self.quantiser, self.latent = quantiser, latent.float()
        pixels = mask.shape[-1] // latent.shape[-1]
        self.known = 1 - F.max_pool2d(mask.to(latent.device, torch.float32), pixels)

    def rows(self, chosen: slice) -> Kept:
        """Return the same for a slice of the images."""
        part = object.__new__(Kept)
        part.quantiser, part.latent, part.known = self.quantiser, self.latent[chosen], self.known[chosen]
        return part

    def __call__(self, canvas: Tensor, scale: int) -> tuple[Tensor, Tensor]:
        """Tokens int64 `[B, n]` for a scale, given the latent so far `[B, C, R, G]`, and bool `[B, n]`, True where kept."""
        share = self.quantiser.shrink(self.known, scale)
        lacking = self.quantiser.shrink((self.latent - canvas) * self.known, scale) / share.clamp(min=1e-6)
        return self.quantiser.nearest(lacking, scale).flatten(1), (share >= _HALF).flatten(1)

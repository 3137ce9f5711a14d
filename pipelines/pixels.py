"""Between tokens and pictures: what every image tokenizer's pixels go through on their way out and in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vargen.picture_files import on_white
from vargen.values import short_repr

logger = logging.getLogger("vargen")


def decoded_pixels(decode: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Float32 `[B, 3, Y, X]` of tokens; by halves where memory does not hold all of them: drawn tokens are not lost to it.

    Raises:
        torch.OutOfMemoryError: if not even one picture fits.
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
    """Float32 `[B, 3, side, side]` in [-1, 1] of PIL images, of a tensor `[B, 3, Y, X]` or array `[B, Y, X, 3]`: floating-point
    numbers in [0, 1], or uint8.

    Args:
        name: of the argument, for messages.

    Raises:
        ValueError, TypeError: for what is no picture, numbers of another type, or ones outside of [0, 1], NaN included.
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
    """A tensor or array with its numbers in [0, 1], as float32."""
    numbers, array = torch.as_tensor(images), isinstance(images, np.ndarray)
    if numbers.dtype == torch.uint8:
        numbers = numbers.float() / 255
    if not numbers.is_floating_point():
        raise TypeError(f"{name} must hold floating-point numbers from 0 to 1, or uint8 from 0 to 255, got {images.dtype}")
    low, high = (float(edge) for edge in numbers.float().aminmax())
    if not (low >= 0 and high <= 1):  # written so that NaN is refused
        raise ValueError(f"{name} must hold numbers from 0 to 1, or be uint8 from 0 to 255, got {low:g} to {high:g}")
    return numbers.float().numpy() if array else numbers.float()

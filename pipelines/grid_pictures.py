"""Conversion between images and tokens on a single grid, for pipelines of next-token models.

Shape suffixes: B images, N tokens of the grid, Y/X pixel rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vargen.compat import without_autocast
from vargen.models.tokenizers.vq import NonFinitePixelsError
from vargen.pipelines import validation as checks
from vargen.pipelines.images import decoded_pixels, preprocess_images


class GridPictures:
    """Mixin of a pipeline that decodes, previews and encodes images."""

    transformer: Any
    vqvae: Any
    image_processor: Any
    _device_of: Callable[[Any], torch.device]

    @torch.no_grad()
    @without_autocast
    def decode_tokens(self, tokens: Tensor, length: Tensor | None = None, output_type: str = "pil") -> Any:
        """Decode tokens int64 `[B, N]` or `[B, rows, columns]` to images. The area of tokens past `length [B]` is left white.

        With `length`, this also previews an image during generation.

        Raises:
            ValueError, TypeError: for tokens that do not fit this model, or an unknown output type.
            NonFinitePixelsError: for NaN or infinite pixels; the message has the image and position of the first one.
        """
        checks.check_output_type(output_type)
        side = self.transformer.config.grid_size
        checks.check_tokens(tokens, self.vqvae.config.codebook_size)
        if tokens.dim() not in (2, 3) or not len(tokens) or tokens[0].numel() != side**2:
            raise ValueError(f"tokens must be [B, {side**2}] or [B, {side}, {side}], got {list(tokens.shape)}")
        if length is not None and tuple(length.shape) != (len(tokens),):
            raise ValueError(f"length must be [{len(tokens)}], one per picture, got {list(length.shape)}")
        tokens = tokens.reshape(-1, side, side)
        if output_type == "latent":
            return tokens
        pixels = decoded_pixels(self.vqvae.decode, tokens.to(self._device_of(self.vqvae)))
        NonFinitePixelsError.check(pixels)
        if length is not None:
            drawn = torch.arange(side * side, device=pixels.device) < length.to(pixels.device)[:, None]
            mask = drawn.view(-1, 1, side, side).repeat_interleave(self.vqvae.downsampling, 2)
            pixels = torch.where(mask.repeat_interleave(self.vqvae.downsampling, 3), pixels, 1.0)
        return self.image_processor.postprocess(pixels.clamp(-1, 1), output_type=output_type)

    def preview(self, tokens: Tensor, drawn: int) -> list[Image.Image]:
        side = self.transformer.config.grid_size
        mask = Image.new("L", (side, side))
        mask.putdata([255 if position < drawn else 0 for position in range(side * side)])
        images = self.decode_tokens(tokens)
        for image in images:
            image.putalpha(mask.resize(image.size, Image.Resampling.NEAREST))
        return images

    @torch.no_grad()
    @without_autocast
    def encode_image(self, images: Any) -> Tensor:
        """Encode PIL images or a tensor `[B, 3, Y, X]` (float in [0, 1], or uint8) to tokens int64 `[B, rows, columns]`.

        Images are resized to the model's size.

        Raises:
            ValueError, TypeError: if it is not an image, or has another dtype or values outside [0, 1].
            NonFinitePixelsError: if the tokenizer returns NaN or infinite values for finite ones.
        """
        side = self.transformer.config.grid_size * self.vqvae.downsampling
        pixels = preprocess_images(images, self.image_processor, side)
        return self.vqvae.encode(pixels.to(self._device_of(self.vqvae), self.vqvae.dtype))

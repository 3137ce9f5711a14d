"""Conversion between images and tokens of all scales, for pipelines of next-scale models.

Shape suffixes: B images, L tokens of all scales, n of one, C latent channels, R/G latent rows and columns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vargen.compat import without_autocast
from vargen.models.tokenizers.multi_scale_quantizer import MultiScaleQuantizer
from vargen.models.tokenizers.vq import NonFinitePixelsError
from vargen.pipelines import validation as checks
from vargen.pipelines.images import Kept, Source, decoded_pixels, preprocess_images


class ScalePictures:
    """Mixin of a pipeline that decodes, previews and encodes images, and prepares source images for inpainting."""

    transformer: Any
    vqvae: Any
    image_processor: Any
    _device_of: Callable[[Any], torch.device]

    def _quantiser(self) -> MultiScaleQuantizer:
        """Return the quantizer on the device of the passes; a (small) copy while the tokenizer is offloaded."""
        own, device = self.vqvae.quantize, self._device_of(self.transformer)
        weight = own.embedding.weight
        return own if weight.is_meta or weight.device == device else copy.deepcopy(own).to(device)

    def _source(self, source: Source | None, count: int, each: int) -> tuple[list[Tensor], Kept | None]:
        """Return the tokens `[B, n]` of the kept coarse scales, and the `Kept` rule for the finer scales under a mask.

        Args:
            count: number of prompts.
            each: images per prompt.

        Raises:
            ValueError: unless there is one source image, or one per prompt.
        """
        if source is None:
            return [], None
        if len(source.pixels) not in (1, count):
            raise ValueError(f"image must be one, or one for each of {count} prompts or classes; got {len(source.pixels)}")
        latent = self._latent(source.pixels)
        latent = latent.expand(count, *latent.shape[1:]).repeat_interleave(each, dim=0)
        tokens, keep = self._quantiser().quantise(latent), None
        if source.mask is not None:
            mask = source.mask.expand(count, *source.mask.shape[1:]).repeat_interleave(each, dim=0)
            keep = Kept(self._quantiser(), latent, mask)
        return [part.flatten(1) for part in tokens[: source.kept_scales(len(tokens))]], keep

    @torch.no_grad()
    @without_autocast
    def decode_tokens(self, tokens: Tensor, length: Tensor | None = None, output_type: str = "pil") -> Any:
        """Decode tokens int64 `[B, L]` of all scales, from coarse to fine, to images.

        Scales that contain -1 or end past `length [B]` are skipped, which gives a coarser image, or a white one if no scale is
        left. So this also previews an image during generation.

        Raises:
            ValueError, TypeError: for tokens that do not fit this model, or an unknown output type.
            NonFinitePixelsError: for NaN or infinite pixels; the message has the image and position of the first one.
        """
        checks.check_output_type(output_type)
        checks.check_tokens(tokens, self.vqvae.config.codebook_size, least=-1)
        if tokens.dim() != 2 or not len(tokens) or tokens.shape[1] != self.vqvae.tokens:
            raise ValueError(f"tokens must be [B, {self.vqvae.tokens}], got {list(tokens.shape)}")
        if length is not None and tuple(length.shape) != (len(tokens),):
            raise ValueError(f"length must be [{len(tokens)}], one per picture, got {list(length.shape)}")
        if output_type == "latent":
            return tokens
        canvas, drawn = self._sum(tokens, length)
        pixels = decoded_pixels(self.vqvae.decode_latent, canvas)
        NonFinitePixelsError.check(pixels)
        pixels = torch.where(drawn.to(pixels.device)[:, None, None, None], pixels, 1.0)
        return self.image_processor.postprocess(pixels.clamp(-1, 1), output_type=output_type)

    def preview(self, tokens: Tensor, drawn: int) -> list[Image.Image]:
        return self.decode_tokens(tokens, torch.full((len(tokens),), drawn))

    def _sum(self, tokens: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum over the complete scales, `[B, C, R, G]`, and bool `[B]`, whether there is any complete scale."""
        device, quantiser = self._device_of(self.vqvae), self._quantiser()
        tokens = tokens.to(quantiser.embedding.weight.device if not quantiser.embedding.weight.is_meta else device)
        ends = torch.tensor([side * side for side in quantiser.scales]).cumsum(0).tolist()
        length = torch.full((len(tokens),), ends[-1]) if length is None else length
        length = length.to(tokens.device)
        canvas: Tensor | float = 0.0
        drawn = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for k, (side, end) in enumerate(zip(quantiser.scales, ends, strict=True)):
            part = tokens[:, end - side * side : end]
            there = (part >= 0).all(1) & (length >= end)
            added = quantiser.lookup(part.clamp(min=0).unflatten(1, (side, side)), k)
            canvas, drawn = canvas + added * there[:, None, None, None], drawn | there
        assert isinstance(canvas, Tensor)
        return canvas.to(device), drawn

    def _latent(self, pixels: Tensor) -> Tensor:
        """Encode pixels `[B, 3, Y, X]` in [-1, 1] to latents `[B, C, R, G]` before quantization."""
        latent = self.vqvae.latent(pixels.to(self._device_of(self.vqvae), self.vqvae.dtype)).float()
        NonFinitePixelsError.check(latent)
        return latent.to(self._device_of(self.transformer))

    @torch.no_grad()
    @without_autocast
    def encode_image(self, images: Any) -> Tensor:
        """Encode PIL images or a tensor `[B, 3, Y, X]` (float in [0, 1], or uint8) to tokens int64 `[B, L]` of all scales.

        Scales are ordered from coarse to fine. Images are resized to the model's size.

        Raises:
            ValueError, TypeError: if it is not an image, or has another dtype or values outside [0, 1].
            NonFinitePixelsError: if the tokenizer returns NaN or infinite values for finite ones.
        """
        latent = self._latent(preprocess_images(images, self.image_processor, self.vqvae.image_size))
        return torch.cat([tokens.flatten(1) for tokens in self._quantiser().quantise(latent)], dim=1)

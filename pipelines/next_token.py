"""Pipelines whose models predict one token after another: LlamaGen, and image language models of transformers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding import DecodeOutput
from vargen.pipelines.generation import ImagePipeline, ImageRequest
from vargen.pipelines.images import validate_decode_arguments


class NextTokenPipeline(ImagePipeline):
    """Base of pipelines whose models predict one token after another."""

    paradigm: ClassVar[str] = "next-token"
    joins_running_batch: ClassVar[bool] = True
    own_arguments: ClassVar[tuple[str, ...]] = ("guidance_interval", "return_log_probs")

    @torch.no_grad()
    @without_autocast
    def decode_tokens(self, tokens: Tensor, length: Tensor | None = None, output_type: str = "pil") -> Any:
        """Decode tokens int64 `[B, N]` or `[B, rows, columns]` to images; white past `length [B]`."""
        validate_decode_arguments(tokens, length, output_type, self.vocab_size)
        rows, columns = self.grids[0]
        if tokens.dim() not in (2, 3) or not len(tokens) or tokens[0].numel() != self.num_tokens:
            raise ValueError(f"tokens must be [B, {self.num_tokens}] or [B, {rows}, {columns}], got {list(tokens.shape)}")
        tokens = tokens.reshape(-1, rows, columns)
        if output_type == "latent":
            return tokens
        pixels = self.decode_grids(tokens)
        if length is not None:
            mask = self.mask_generated(length.to(pixels.device), (pixels.shape[2], pixels.shape[3]))
            pixels = torch.where(mask, pixels, 1.0)
        if output_type == "pt":
            return pixels
        array = VaeImageProcessor.pt_to_numpy(pixels)
        return array if output_type == "np" else VaeImageProcessor.numpy_to_pil(array)

    @abstractmethod
    def decode_grids(self, tokens: Tensor) -> Tensor:
        """Decode tokens int64 `[B, rows, columns]` to pixels float32 `[B, 3, Y, X]` in [0, 1]."""

    @abstractmethod
    def mask_generated(self, length: Tensor, size: tuple[int, int]) -> Tensor:
        """Return which of Y rows and X columns of pixels, bool `[B, 1, Y, X]`, the first `length` `[B]` tokens determine."""

    def preview(self, tokens: Tensor, num_tokens: int) -> list[Image.Image]:
        images, length = self.decode_tokens(tokens), torch.tensor([num_tokens])
        for image in images:
            mask = self.mask_generated(length, (image.height, image.width))[0, 0]
            image.putalpha(Image.fromarray(mask.numpy().astype("uint8") * 255))
        return images

    def _decode(self, request: ImageRequest, callback: Any) -> DecodeOutput:
        return self._engines.decode(self, request, callback)

    @property
    def num_baseline_passes(self) -> int:
        return self.num_tokens

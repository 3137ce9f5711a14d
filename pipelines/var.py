"""`VARPipeline`: text or class to image, scale by scale."""

from __future__ import annotations

import copy
import math
from itertools import accumulate
from operator import attrgetter
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from vargen.compat import without_autocast
from vargen.convert.var import DEFAULTS, convert_var
from vargen.models.guidance import Guidance, to_guidance
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.vq import NonFinitePixelsError
from vargen.models.var.decoding import VARScaleModel
from vargen.models.var.network import SCALES, VARTransformer, official_config
from vargen.pipelines.families import TEXT_COMPONENTS, Component, ModelFamily, register_family
from vargen.pipelines.generation import ImagePipeline
from vargen.pipelines.images import (
    FixedTokens,
    InpaintSource,
    decode_pixels,
    preprocess_images,
    validate_decode_arguments,
)


class VARPipeline(ImagePipeline):
    """Text or class to image, scale by scale, with VAR (Tian et al. 2024).

    Example:
        >>> from vargen import VARPipeline
        >>> pipe = VARPipeline.from_pretrained("var-d16")
        >>> pipe(class_labels=207, generator=torch.Generator().manual_seed(0)).save("dog.png")

    Args:
        vqvae: multi-scale image tokenizer.
        transformer: the network that predicts tokens.
        text_encoder, tokenizer: encoder of prompts (`condition="text"` only).
        draft_transformer: a smaller transformer with the same tokens and conditions, for `accelerator="code"` and others.
        id2label, defaults, prompt_styles, prompt_names: as in `LlamaGenPipeline`.
    """

    paradigm: ClassVar[str] = "next-scale"
    own_arguments: ClassVar[tuple[str, ...]] = ("image", "mask_image", "strength")
    baseline: ClassVar[str] = "plain"
    default_method = "plain"
    usual_sampling: ClassVar[dict[str, Any]] = DEFAULTS

    image_size: Any = property(attrgetter("vqvae.image_size"))
    codebook: Any = property(attrgetter("vqvae.codebook"))
    max_caption_tokens: Any = property(attrgetter("transformer.config.caption_rows"))

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        return tuple((side, side) for side in self.transformer.scales)

    @property
    def num_baseline_passes(self) -> int:
        return len(self.grids)

    def decoding_model(self, guidance: Guidance | float = 1.0) -> VARScaleModel:
        """Return the adapter of the transformer and its draft model for `vargen.decoding.decode_scales`."""
        guidance, quantizer, device = to_guidance(guidance), self._quantizer(), self._device_of(self.transformer)
        draft = self.draft_transformer and VARScaleModel(self.draft_transformer, quantizer, guidance, device=device)
        return VARScaleModel(self.transformer, quantizer, guidance, draft_model=draft, device=device)

    def _quantizer(self) -> Any:
        """Return the quantizer on the device of the passes; a (small) copy while the tokenizer is offloaded."""
        own, device = self.vqvae.quantize, self._device_of(self.transformer)
        weight = own.embedding.weight
        return own if weight.is_meta or weight.device == device else copy.deepcopy(own).to(device)

    def _encode_source(self, source: InpaintSource, num_prompts: int, images: int) -> FixedTokens:
        if len(source.pixels) not in (1, num_prompts):
            raise ValueError(f"image must be one, or one per prompt, got {len(source.pixels)} for {num_prompts}")

        def per_image(part: Tensor) -> Tensor:
            return part.expand(num_prompts, *part.shape[1:]).repeat_interleave(images // num_prompts, dim=0)

        latent, quantizer = per_image(self._encode_latent(source.pixels)), self._quantizer()
        mask = None if source.mask is None else per_image(source.mask)
        scales = len(quantizer.scales)  # of which any strength above 0 regenerates at least the finest
        return FixedTokens.build(quantizer, latent, mask, scales - math.ceil(round(source.strength * scales, 6)))

    @torch.no_grad()
    @without_autocast
    def decode_tokens(self, tokens: Tensor, length: Tensor | None = None, output_type: str = "pil") -> Any:
        """Decode tokens int64 `[B, L]` of all scales, from coarse to fine, to images.

        Scales that contain -1 or end past `length [B]` are skipped, which gives a coarser image, or a white one if no scale is
        left. So this also previews an image during generation.
        """
        validate_decode_arguments(tokens, length, output_type, self.vocab_size, minimum=-1)
        if tokens.dim() != 2 or not len(tokens) or tokens.shape[1] != self.num_tokens:
            raise ValueError(f"tokens must be [B, {self.num_tokens}], got {list(tokens.shape)}")
        if output_type == "latent":
            return tokens
        canvas, generated = self._accumulate_scales(tokens, length)
        pixels = decode_pixels(self.vqvae.decode_latent, canvas)
        pixels = torch.where(generated.to(pixels.device)[:, None, None, None], pixels, 1.0)
        return self.image_processor.postprocess(pixels.clamp(-1, 1), output_type=output_type)

    def preview(self, tokens: Tensor, num_tokens: int) -> list[Image.Image]:
        return self.decode_tokens(tokens, torch.full((len(tokens),), num_tokens))

    def _accumulate_scales(self, tokens: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum over the complete scales, `[B, C, R, G]`, and whether there is any, bool `[B]`."""
        device, quantizer = self._device_of(self.vqvae), self._quantizer()
        tokens, ends = tokens.to(self._device_of(self.transformer)), [*accumulate(quantizer.scale_tokens)]
        length = torch.full((len(tokens),), ends[-1]) if length is None else length
        length = length.to(tokens.device)
        canvas: Tensor | float = 0.0
        generated = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for k, (part, end) in enumerate(zip(tokens.split(quantizer.scale_tokens, dim=1), ends, strict=True)):
            complete = (part >= 0).all(1) & (length >= end)
            added = quantizer.lookup(part.clamp(min=0), k)
            canvas = canvas + added * complete[:, None, None, None]
            generated = generated | complete
        assert isinstance(canvas, Tensor)
        return canvas.to(device), generated

    def _encode_latent(self, pixels: Tensor) -> Tensor:
        """Encode pixels `[B, 3, Y, X]` in [-1, 1] to latents `[B, C, R, G]` before quantization."""
        latent = self.vqvae.encode_latent(pixels.to(self._device_of(self.vqvae), self.vqvae.dtype)).float()
        NonFinitePixelsError.check(latent)
        return latent.to(self._device_of(self.transformer))

    @torch.no_grad()
    @without_autocast
    def encode_image(self, images: Any) -> Tensor:
        """Encode images, which are resized, to tokens int64 `[B, L]` of all scales, from coarse to fine."""
        latent = self._encode_latent(preprocess_images(images, self.image_processor, self.image_size))
        return torch.cat([tokens.flatten(1) for tokens in self._quantizer().quantize(latent)], dim=1)


VAR = register_family(
    ModelFamily(
        name="var",
        pipeline=VARPipeline,
        components={
            "vqvae": Component(
                (MultiScaleVQModel,),
                required=True,
                matches={"codebook_size": "vocab_size", "codebook_embed_dim": "code_dim", "scales": "scales"},
            ),
            "transformer": Component((VARTransformer,), required=True, follows_dtype=True),
            **TEXT_COMPONENTS,
            "draft_transformer": Component(
                (VARTransformer,), follows_dtype=True, matches=("condition", "vocab_size", "code_dim", "scales")
            ),
        },
        condition_settings={"class": ("num_classes",), "text": ("caption_rows", "caption_dim")},
        convert=convert_var,
        official_sizes={
            f"var-d{depth}": {"transformer": official_config(depth, pixels), "vqvae": {"scales": SCALES[pixels]}}
            for depth, pixels in ((16, 256), (20, 256), (24, 256), (30, 256), (36, 512))
        },
    )
)

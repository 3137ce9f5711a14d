"""`LlamaGenPipeline`: text or class to image with a LlamaGen transformer and its VQ tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.convert.llamagen import convert_llamagen
from vargen.decoding import Eagle, Medusa
from vargen.folders.networks import require_equal
from vargen.models.guidance import Guidance, to_guidance
from vargen.models.heads.decoding import EagleModel, LowResolutionDrafter, MedusaHeads
from vargen.models.heads.network import EagleDrafter, MedusaDrafter, TokenUpsampler
from vargen.models.llamagen.decoding import LlamaGenTokenModel
from vargen.models.llamagen.network import SIZES, LlamaGenTransformer
from vargen.models.tokenizers.ta_tok import TATokDecoder
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.families import TEXT_COMPONENTS, Component, ModelFamily, register_family
from vargen.pipelines.generation import NextTokenPipeline
from vargen.pipelines.images import decode_pixels, preprocess_images


class LlamaGenPipeline(NextTokenPipeline):
    """Text or class to image with LlamaGen (Sun et al. 2024).

    Example:
        >>> from vargen import LlamaGenPipeline
        >>> pipe = LlamaGenPipeline.from_pretrained("emoji")
        >>> pipe("a red apple").save("apple.png")

    Args:
        vqvae: image tokenizer.
        transformer: the network that predicts tokens.
        text_encoder, tokenizer: encoder of prompts (`condition="text"` only).
        draft_transformer: a smaller transformer with the same tokens and conditions, for `accelerator="speculative"`.
        id2label: class names (comma-separated synonyms) by class number (`condition="class"` only).
        defaults: default sampling settings of this checkpoint (`guidance_scale`, `temperature`, `top_k`, `top_p`, `min_p`).
        prompt_styles: style words in the training captions, such as "flat" in "a red apple, flat style".
        prompt_names: names that replace characters in a prompt, such as "grinning cat" for "😺"; only for models whose training
            captions contain these names. Stored in the model folder as `prompt_names.json`.
        eagle, medusa: drafters trained on the transformer's features, for the methods of these names; see `load_drafter`.
        low_res: a transformer with the same tokens and conditions and a smaller grid, which drafts for `accelerator="mulo"`.
        upsampler: predicts token probabilities from low-resolution images. Without it, they are decoded, resized and encoded.
        ta_tok: features of the tokens of Tar, for which a transformer with `condition="features"` makes images.
    """

    low_res: LlamaGenTransformer | None = None
    upsampler: TokenUpsampler | None = None
    ta_tok: TATokDecoder | None = None
    max_caption_tokens: Any = property(attrgetter("transformer.config.cls_token_num"))

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        side = self.transformer.config.grid_size
        return ((side, side),)

    @property
    def codebook(self) -> Tensor:
        return self.vqvae.quantize.codebook()

    def decoding_model(self, guidance: Guidance | float = 1.0) -> LlamaGenTokenModel:
        """Return the adapter of the transformer and its drafters for `vargen.decoding.decode`."""
        device, guidance = self._device_of(self.transformer), to_guidance(guidance)
        codes = None if self.vqvae is None else self.codebook.to(device)
        drafters = {name: each for name, each in self.family.drafters.items() if getattr(self, name) is not None}
        heads = {name: partial(each.adapter, getattr(self, name)) for name, each in drafters.items()}
        smaller: tuple[Any, ...] = (self.draft_transformer, self.low_res)
        draft, low = (each and LlamaGenTokenModel(each, guidance, device=device) for each in smaller)
        needs_low = low is not None and codes is not None
        return LlamaGenTokenModel(
            self.transformer,
            guidance,
            codebook=codes,
            draft_model=draft,
            draft_heads=heads,
            low_res=LowResolutionDrafter(low, self.grids[-1], self.upsampler, self.vqvae) if needs_low else None,
            device=device,
        )

    def encode_semantic_tokens(self, tokens: Tensor) -> Tensor:
        """Return the `prompt_embeds` `[B, P, C]` of tokens int64 `[B, P]` or `[B, rows, columns]` of a Tar model."""
        if self.ta_tok is None:
            raise ValueError("this model has no ta_tok: it makes no images of the tokens of Tar")
        return self.ta_tok.decode(tokens.flatten(1))

    def decode_grids(self, tokens: Tensor) -> Tensor:
        pixels = decode_pixels(self.vqvae.decode, tokens.to(self._device_of(self.vqvae)))
        return (pixels.clamp(-1, 1) * 0.5 + 0.5).clamp(0, 1)

    @torch.no_grad()
    @without_autocast
    def encode_image(self, images: Any) -> Tensor:
        """Encode images as of `preprocess_images`, which are resized, to tokens int64 `[B, rows, columns]`."""
        side = self.transformer.config.grid_size * self.vqvae.downsampling
        pixels = preprocess_images(images, self.image_processor, side)
        return self.vqvae.encode(pixels.to(self._device_of(self.vqvae), self.vqvae.dtype))


def validate_low_res(configs: Mapping[str, Any]) -> None:
    """Raise ValueError unless the low-resolution grid divides the transformer's, and its up-sampler fits."""
    low, large = configs.get("low_res"), configs["transformer"]["grid_size"]
    if low is None and configs.get("upsampler") is not None:
        raise ValueError("upsampler needs the low_res transformer whose images it enlarges")
    if low is not None and (low["grid_size"] >= large or large % low["grid_size"]):
        raise ValueError(f"low_res and transformer do not belong together: grid_size {low['grid_size']} must divide {large}")
    require_equal(configs, "upsampler", "low_grid", "low_res", "grid_size")


_HEAD: dict[str, Any] = {"follows_dtype": True, "matches": ("dim", "vocab_size", "grid_size"), "run_folder": "drafter"}

LLAMAGEN = register_family(
    ModelFamily(
        name="llamagen",
        pipeline=LlamaGenPipeline,
        components={
            "vqvae": Component((VQModel,), required=True, matches={"codebook_size": "vocab_size"}),
            "transformer": Component((LlamaGenTransformer,), required=True, follows_dtype=True),
            **TEXT_COMPONENTS,
            "draft_transformer": Component(
                (LlamaGenTransformer,), follows_dtype=True, matches=("condition", "vocab_size", "grid_size")
            ),
            "eagle": Component((EagleDrafter,), adapter=EagleModel, drafter=Eagle, **_HEAD),
            "medusa": Component((MedusaDrafter,), adapter=MedusaHeads, drafter=Medusa, **_HEAD),
            "low_res": Component(
                (LlamaGenTransformer,), follows_dtype=True, matches=("condition", "vocab_size"), run_folder="transformer"
            ),
            "upsampler": Component((TokenUpsampler,), matches=("vocab_size", "grid_size"), run_folder="upsampler"),
            "ta_tok": Component((TATokDecoder,), matches={"dim": "caption_dim"}),
        },
        condition_settings={"class": ("num_classes",), **dict.fromkeys(("text", "features"), ("cls_token_num", "caption_dim"))},
        check_compatible=validate_low_res,
        convert=convert_llamagen,
        official_sizes={f"llamagen-{name.lower()}": {"transformer": size} for name, size in SIZES.items()},
    )
)

"""`InfinityPipeline`: text to image of many sizes and ratios, scale by scale, where a token is its bits."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vargen.convert.infinity import DEFAULTS, convert_infinity
from vargen.decoding import Sampling
from vargen.models.guidance import Condition, Guidance
from vargen.models.infinity.decoding import BitGuidance, InfinityScaleModel
from vargen.models.infinity.network import SIZES, InfinityTransformer
from vargen.models.infinity.schedules import ScalePlan, choose_plan
from vargen.models.tokenizers.bsq import TOKENIZERS, BitQuantizer, BSQModel
from vargen.pipelines.families import (
    TEXT_COMPONENTS,
    Component,
    ModelFamily,
    register_family,
    validate_sampling_defaults,
)
from vargen.pipelines.images import ImagePipelineOutput
from vargen.pipelines.var import VARPipeline
from vargen.values import require_int

logger = logging.getLogger("vargen")
_VOCAB = 2  # values of a bit


class InfinityPipeline(VARPipeline):
    """Text to image, scale by scale, with Infinity (Han et al. 2024).

    Tokens, in results and callbacks, are bits: those of one token after another, scale by scale.

    Example:
        >>> from vargen import InfinityPipeline
        >>> pipe = InfinityPipeline.from_pretrained("infinity-2b")
        >>> pipe("a red apple", height=832, width=1248).save("apple.png")

    Args:
        vqvae: bitwise image tokenizer.
        transformer: the network that predicts bits.
        text_encoder, tokenizer: encoder of prompts; without one, calls take `prompt_embeds`.
        draft_transformer: a smaller transformer with the same bits and text features, for `accelerator="code"` and others.
        defaults, prompt_styles, prompt_names: as in `LlamaGenPipeline`.
    """

    recorded_arguments: ClassVar[tuple[str, ...]] = ("height", "width", "cfg_insertion_layer")
    usual_sampling: ClassVar[dict[str, Any]] = {**DEFAULTS[True], "top_k": None}
    vocab_size: Any = _VOCAB
    codebook: Any = torch.tensor([[-1.0], [1.0]])

    _plan: ScalePlan | None = None
    _tile: int | None = None
    _layers: Any = None

    @property
    def plan(self) -> ScalePlan:
        """Scales of the images that it generates; see `at_size`."""
        return self._plan or ScalePlan.official(self.transformer.config.num_scales)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        return self.plan.scales

    @property
    def num_tokens(self) -> int:
        """Number of bits of an image, of all scales."""
        return sum(self._quantizer().scale_tokens)

    @property
    def pixel_size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        rows, columns = self.grid
        return rows * self.vqvae.stride, columns * self.vqvae.stride

    @property
    def image_size(self) -> int | tuple[int, int]:
        height, width = self.pixel_size
        return height if height == width else (height, width)

    def at_size(self, height: Any = None, width: Any = None, pn: Any = None) -> InfinityPipeline:
        """Return a pipeline for images of another size, with the same components; see `__call__`.

        What `decode_tokens`, `preview` and `encode_image` take and return is of its size.
        """
        if height is None and width is None and pn is None:
            return self
        changed = copy.copy(self)
        changed._plan = choose_plan(height, width, pn, self.transformer.config.num_scales, self.vqvae.stride)
        if height is not None and changed.pixel_size != (height, width):
            taken = "{1}x{0}".format(*changed.pixel_size)
            logger.warning("height and width: images are %s pixels, the official size nearest to %sx%s", taken, width, height)
        return changed

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        pn: str | None = None,
        tile: int | None = None,
        cfg_insertion_layer: list[int] | None = None,
        **options: Any,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Generate images; see `ImagePipeline.__call__` for all other arguments.

        Args:
            height, width: size in pixels. Images have the official ratio, and for it the number of pixels, nearest to it.
                Default: as the model's `num_scales`, square. `parameters()` of the result has the size that was taken.
            pn: number of pixels by its official name: 0.06M, 0.25M, 0.60M or 1M.
            tile: number of tokens that are computed at a time in a pass, to bound its memory. Bits are the same.
            cfg_insertion_layer: where guidance acts: 0 for the logits, -m for the output of the m-th block from the end.
                Default: [0].
            options: of `ImagePipeline.__call__`. `guidance_scale`, the official `cfg`, is the same at all scales, and with
                `temperature` may be a list with a number for each scale. Scales after which none is guided take half of the
                work. With `image`, and `strength` as the fraction of scales to generate, it is the official `gt_leak`.
        """
        pipe = self.at_size(height, width, pn)
        if tile is not None or cfg_insertion_layer is not None:
            pipe = copy.copy(pipe)
            pipe._tile = None if tile is None else require_int("tile", tile, 1)
            pipe._layers = cfg_insertion_layer
        result = super(InfinityPipeline, pipe).__call__(prompt, **options)
        if isinstance(result, ImagePipelineOutput) and result._call is not None:
            own: dict[str, Any] = {"cfg_insertion_layer": cfg_insertion_layer}
            own |= {name: options.get(name) for name in ("guidance_scale", "temperature")}
            recorded = {name: list(value) for name, value in own.items() if isinstance(value, list | tuple)}
            if pipe._plan is not None:
                recorded |= zip(("height", "width"), pipe.pixel_size, strict=True)  # type: ignore[arg-type]
            result._call = replace(result._call, others={**result._call.others, **recorded})  # type: ignore[misc]
        return result

    def resolve_sampling(self, guidance_interval: Any = None, **given: Any) -> tuple[Guidance, Sampling]:
        """As in all pipelines, with lists by scale."""
        asked = {**self.default_sampling, **{name: value for name, value in given.items() if value is not None}}
        scale, temperature, depth = asked["guidance_scale"], asked["temperature"], self.transformer.config.depth
        guidance = BitGuidance.make(scale, temperature, self._layers, len(self.plan.scales), depth)
        if guidance.temperatures is not None:
            asked["temperature"] = 1.0
        _, sampling = super().resolve_sampling(guidance_interval, **{**asked, "guidance_scale": guidance.scale})
        return guidance, sampling

    def encode_condition(self, *prompts: Any, **given: Any) -> tuple[Condition, int]:
        """As in all pipelines; a text has at least one valid row."""
        condition, count = super().encode_condition(*prompts, **given)
        for name, each in (("prompt_mask", condition), ("negative_prompt_mask", condition.negative)):
            if each is not None and each.caption_mask is not None and not each.caption_mask.any(1).all():
                raise ValueError(f"{name} must have a valid row for each prompt, got one without any")
        return condition, count

    def decoding_model(self, guidance: Guidance | float = 1.0) -> InfinityScaleModel:
        """Return the adapter of the transformer and its draft model for `vargen.decoding.decode_scales`.

        The draft model is guided at its logits.
        """
        options: dict[str, Any] = {"tile": self._tile, "device": self._device_of(self.transformer)}
        small, draft = guidance, None
        if isinstance(guidance, BitGuidance):
            small = replace(guidance, layers=(0,))
        if self.draft_transformer is not None:
            draft = InfinityScaleModel(self.draft_transformer, self._quantizer(), self.plan, small, **options)
        return InfinityScaleModel(self.transformer, self._quantizer(), self.plan, guidance, draft_model=draft, **options)

    def _quantizer(self) -> BitQuantizer:
        return self.vqvae.quantizer(self.plan.scales)


def _validate_bits(configs: Mapping[str, Any]) -> None:
    """Raise ValueError unless the transformer's tokens have the bits of the tokenizer's positions."""
    bits, tokenizer = configs["transformer"]["code_dim"], configs.get("vqvae")
    if tokenizer is not None and bits != tokenizer["bits"] * (4 if tokenizer["patchify"] else 1):
        per = " of each of 4 positions" * tokenizer["patchify"]
        found = f"code_dim {bits}, and bits {tokenizer['bits']}{per}"
        raise ValueError(f"transformer and vqvae do not belong together: {found}")


INFINITY = register_family(
    ModelFamily(
        name="infinity",
        pipeline=InfinityPipeline,
        components={
            "vqvae": Component((BSQModel,), required=True),
            "transformer": Component((InfinityTransformer,), required=True, follows_dtype=True),
            **TEXT_COMPONENTS,
            "draft_transformer": Component(
                (InfinityTransformer,), follows_dtype=True, matches=("code_dim", "caption_dim", "caption_rows")
            ),
        },
        check_compatible=_validate_bits,
        check_defaults=lambda defaults, _: validate_sampling_defaults(defaults, {"vocab_size": _VOCAB}),
        convert=convert_infinity,
        official_sizes={name: {"transformer": size, "vqvae": TOKENIZERS[size["code_dim"]]} for name, size in SIZES.items()},
    )
)

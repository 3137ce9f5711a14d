"""`VARPipeline`: text or class to image, scale by scale, with a VAR transformer and its multi-scale tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.convert.var import DEFAULTS, convert_var
from vargen.decoding import DecodeOutput, DecodeStats, Progress, ScaleSchedule, decode_scales
from vargen.models.condition import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var import VARTransformer
from vargen.pipelines import validation as checks
from vargen.pipelines import var_network
from vargen.pipelines.adapters.var import VARScaleModel
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.components import TEXT_COMPONENTS, Component, ModelFamily, register_family
from vargen.pipelines.decoders import ScaleDecoder
from vargen.pipelines.generation import CandidateSelection, PromptInputs, check_call, drawn, requested, resolve_sampling
from vargen.pipelines.images import check_source
from vargen.pipelines.model_info import ModelInfo
from vargen.pipelines.prompt_names import PromptNames
from vargen.pipelines.scale_pictures import ScalePictures

from diffusers.utils import BaseOutput  # isort: skip  # after base, which guards torchvision


@dataclass
class VARPipelineOutput(BaseOutput):
    """Result of a call.

    Attributes:
        images: depending on `output_type`, a list of PIL images, a float32 NumPy array `[B, Y, X, 3]` or torch tensor
            `[B, 3, Y, X]` in [0, 1], or tokens, int64 `[B, L]`, all scales from coarse to fine, -1 in skipped scales.
        stats: statistics of decoding; see `vargen.decoding.DecodeStats`.
    """

    images: Any
    stats: DecodeStats


class VARPipeline(ScalePictures, VisualPipeline):
    """Text or class to image, scale by scale, with VAR (Tian et al. 2024).

    Example:
        >>> from vargen import VARPipeline
        >>> pipe = VARPipeline.from_pretrained("var-d16")
        >>> pipe(class_labels=207, generator=torch.Generator().manual_seed(0)).images[0].save("dog.png")

    Args:
        vqvae: multi-scale image tokenizer.
        transformer: the network that predicts tokens.
        text_encoder, tokenizer: encoder of prompts (`condition="text"` only).
        draft_transformer: a smaller transformer with the same tokens and conditions, for `accelerator="code"` and others.
        id2label, defaults, prompt_styles, prompt_names: as in `LlamaGenPipeline`.

    Raises:
        ValueError: for components that do not match each other, or class names or defaults that are not valid.
    """

    paradigm: ClassVar[str] = "next-scale"
    output: ClassVar[Any] = VARPipelineOutput
    baseline: ClassVar[str] = "plain"
    default_method: ClassVar[str] = "plain"
    usual_sampling: ClassVar[dict[str, Any]] = DEFAULTS

    def __init__(
        self,
        vqvae: MultiScaleVQModel,
        transformer: VARTransformer,
        text_encoder: Any = None,
        tokenizer: Any = None,
        draft_transformer: VARTransformer | None = None,
        id2label: dict[int, str] | None = None,
        defaults: dict[str, Any] | None = None,
        prompt_styles: list[str] | None = None,
        prompt_names: PromptNames | dict[str, str] | None = None,
    ):
        parts = {
            "vqvae": vqvae, "transformer": transformer, "text_encoder": text_encoder, "tokenizer": tokenizer,
            "draft_transformer": draft_transformer,
        }  # fmt: skip
        self._set_up(parts, {"id2label": id2label, "defaults": defaults, "prompt_styles": prompt_styles}, prompt_names)

    # -- properties -----------------------------------------------------------------------------------------------------

    @classmethod
    def described(cls, folder: Path, index: Mapping[str, Any]) -> ModelInfo:
        with torch.device("meta"):  # fills in default values that the file omits
            transformer = VARTransformer.from_config(VARTransformer.load_config(folder / "transformer"))
            side = MultiScaleVQModel.from_config(MultiScaleVQModel.load_config(folder / "vqvae")).image_size
        names = {int(number): label for number, label in (index.get("id2label") or {}).items()}
        has_draft = bool((index.get("draft_transformer") or [None])[0])
        config = transformer.config
        return ModelInfo(
            folder, cls.__name__, config.condition, config.vocab_size, transformer.tokens, config.num_classes, names, has_draft,
            len(transformer.scales), side,
        )  # fmt: skip

    @classmethod
    def check_method(cls, described: ModelInfo, method: Any) -> None:
        method.assign_stages(described.steps)
        if method.needs_draft_model and not described.has_draft:
            raise ValueError(f"{method.name} needs a draft_transformer, a smaller model, and this model has none")

    def check_runs(self, method: Any) -> None:
        method.bind(self.scale_model(1.0))

    def decoder(self, settings: Mapping[str, Any]) -> ScaleDecoder:
        scale, sampling = checks.check_sampling({**self.default_sampling, **settings})
        return ScaleDecoder(self.scale_model(scale), sampling)

    @property
    def vocab(self) -> int:
        return self.transformer.config.vocab_size

    @property
    def tokens(self) -> int:
        return self.transformer.tokens

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        return tuple((side, side) for side in self.transformer.scales)

    @property
    def steps(self) -> int:
        return len(self.transformer.scales)

    @property
    def codebook(self) -> Tensor:
        return self.vqvae.codebook

    @property
    def caption_rows(self) -> int:
        return self.transformer.config.caption_rows

    # -- the call -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @without_autocast
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        image: Any = None,
        mask: Any = None,
        strength: float | None = None,
        class_labels: int | str | list[int | str] | Tensor | None = None,
        num_images_per_prompt: int = 1,
        num_candidates: int = 1,
        scorer: Any = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        negative_prompt: str | list[str] | None = None,
        accelerator: str | ScaleSchedule = "plain",
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_mask: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_mask: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        compile: bool = False,
        clean_prompt: bool = False,
    ) -> VARPipelineOutput | tuple[Any]:
        """Generate images.

        Args:
            prompt: one prompt or several (`condition="text"`).
            image: source of a variation or, with `mask`, of inpainting: a PIL image, or a tensor `[N, 3, Y, X]`, float in
                [0, 1] or uint8. It must have the model's size. One for all prompts, or one per prompt.
            mask: white in the area to inpaint; a PIL image, or numbers in [0, 1], of the size of the image.
            strength: fraction of the scales to regenerate, from the finest down, in [0, 1]. Default: 0.8, and 1 with a mask.
            class_labels: one class or several, by number or, where the checkpoint has them, name (`condition="class"`).
            num_images_per_prompt: number of images per prompt or class.
            num_candidates, scorer: as in `LlamaGenPipeline`: generate several candidates per image, and keep the best.
            guidance_scale: scale of classifier-free guidance, at least 0; 1 disables it. Guidance grows linearly over the
                scales from none at the first to this value at the last. The official `cfg` is this value minus 1. None: the
                checkpoint's default; so for `temperature`, `top_k` and `top_p`.
            negative_prompt: replaces the null caption in guidance; one for all prompts, or one per prompt.
            accelerator: name of a preset (`vargen info presets` lists them), or a `ScaleSchedule`.
            generator, prompt_embeds, prompt_mask, negative_prompt_embeds, negative_prompt_mask: as in `LlamaGenPipeline`.
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"` for the tokens.
            return_dict: False returns `(images,)`.
            callback_on_step_end: called as `f(pipe, step, tokens_drawn, {"latents": tokens})` after every pass;
                `pipe.preview(tokens, tokens_drawn)` returns the partial image. It may change the tokens of the latest scale.
                Returning `{"stop": True}`, or setting `pipe._interrupt`, ends the call with the tokens generated so far.
            compile: run the passes through `torch.compile`; the first call takes minutes. Rejected on CPUs: no gain.
            clean_prompt: clean the prompt as in the training of official text models (needs ftfy and beautifulsoup4).

        Raises:
            ValueError, TypeError: for invalid arguments, naming the argument, its value and what is allowed.
            NonFiniteLogitsError: if the transformer returns NaN or infinite logits.
            NonFinitePixelsError: if the tokenizer returns NaN or infinite pixels.
        """
        inputs = callback_on_step_end_tensor_inputs
        check_call(self, output_type, compile, callback_on_step_end, inputs, negative_prompt)
        schedule = self.resolved(accelerator)
        given = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        scale, sampling = resolve_sampling(self, given)
        best = CandidateSelection.checked(num_candidates, scorer, self.named_scorer)
        source = check_source(image, mask, strength, self.vqvae.image_size, self.image_processor)
        self.check_runs(schedule)
        asked = PromptInputs(prompt, prompt_embeds, prompt_mask, class_labels)
        unwanted = PromptInputs(negative_prompt, negative_prompt_embeds, negative_prompt_mask)
        request = requested(self, asked, unwanted, num_images_per_prompt, generator, best, clean_prompt)
        kept, keep = self._source(source, request.prompts, request.drawn // request.prompts)

        def run(chosen: slice, callback: Callable[[Progress], bool | None]) -> DecodeOutput:
            return decode_scales(
                self.scale_model(scale, request.negative and request.negative.rows(chosen), compile),
                request.condition.rows(chosen),
                request.seeds.noise[chosen],
                schedule,
                sampling,
                fixed_scales=[tokens[chosen] for tokens in kept],
                fixed_tokens=keep and keep.rows(chosen),
                callback=callback,
            )

        return drawn(self, request, scale, run, callback_on_step_end, output_type, return_dict)

    def scale_model(self, guidance_scale: float, negative: Condition | None = None, compile: bool = False) -> VARScaleModel:
        """Return the adapter of the transformer and its draft model for `vargen.decoding.decode_scales`; arguments as in
        `__call__`."""
        scale, quantiser = checks.check_guidance(guidance_scale), self._quantiser()
        device = self._device_of(self.transformer)
        draft = self.draft_transformer
        small = None if draft is None else VARScaleModel(draft, quantiser, scale, negative, device=device)
        step = self._step() if compile else None
        return VARScaleModel(self.transformer, quantiser, scale, negative, step, small, device)


VAR = register_family(
    ModelFamily(
        name="var",
        pipeline=VARPipeline,
        components={
            "transformer": Component((VARTransformer,), required=True, follows_dtype=True),
            "vqvae": Component(
                (MultiScaleVQModel,),
                required=True,
                matches={"codebook_size": "vocab_size", "codebook_embed_dim": "code_dim", "scales": "scales"},
            ),
            "draft_transformer": Component(
                (VARTransformer,), follows_dtype=True, matches=("condition", "vocab_size", "code_dim", "scales")
            ),
            **TEXT_COMPONENTS,
        },
        condition_settings={"class": ("num_classes",), "text": ("caption_rows", "caption_dim")},
        convert=convert_var,
        benchmark=var_network,
    )
)

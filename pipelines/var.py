"""`VARPipeline`: a prompt or a class to pictures, scale by scale, with a VAR transformer and its multi-scale tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.convert.var import DEFAULTS
from vargen.decoding import DecodeOutput, DecodeStats, Progress, ScaleSchedule, decode_scales
from vargen.models.condition import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var import VARTransformer
from vargen.pipelines import validation as checks
from vargen.pipelines.adapters.var import VARScaleModel
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.decoders import ScaleDecoder
from vargen.pipelines.generation import CandidateSelection, PromptInputs, check_call, drawn, requested, resolve_sampling
from vargen.pipelines.images import check_source
from vargen.pipelines.model_info import ModelInfo
from vargen.pipelines.prompt_names import PromptNames
from vargen.pipelines.scale_pictures import ScalePictures

from diffusers.utils import BaseOutput  # isort: skip  # behind base, which guards torchvision


@dataclass
class VARPipelineOutput(BaseOutput):
    """Result of a call.

    Attributes:
        images: a list of PIL images; or float32 `[B, Y, X, 3]` numpy or `[B, 3, Y, X]` torch in [0, 1]; or tokens, int64
            `[B, L]`, all scales from coarse to fine, -1 at those that were left out; by `output_type`.
        stats: what decoding did; see `vargen.decoding.DecodeStats`.
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
        vqvae: multi-scale tokenizer between pixels and tokens.
        transformer: the network that draws tokens.
        text_encoder, tokenizer: what turns a prompt into caption features (`condition="text"` only).
        draft_transformer: a smaller transformer of the same tokens and conditions, for `accelerator="code"` and others.
        id2label, defaults, prompt_styles, prompt_names: as of `LlamaGenPipeline`.

    Raises:
        ValueError: for parts that do not belong together, class names or defaults that a call could not use.
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

    # -- what it is -----------------------------------------------------------------------------------------------------

    @classmethod
    def described(cls, folder: Path, index: Mapping[str, Any]) -> ModelInfo:
        with torch.device("meta"):  # fills in what the file leaves to the defaults
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
        method.check_scales(described.steps)
        if method.drafts and not described.has_draft:
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
        """Draw pictures.

        Args:
            prompt: one prompt or several (`condition="text"`).
            image: draw a picture like this one, or, with `mask`, draw a part of it anew: a PIL image, or `[N, 3, Y, X]`, float
                in [0, 1] or uint8, of the model's size; one for all prompts, or one for each.
            mask: white where the image is drawn anew, as large as it is; a PIL image, or numbers in [0, 1].
            strength: share of the scales, the fine ones, that are drawn anew, in [0, 1]. Default: 0.8, and 1 with a mask.
            class_labels: one class or several, by number or, where the checkpoint has them, name (`condition="class"`).
            num_images_per_prompt: pictures of each.
            num_candidates, scorer: as of `LlamaGenPipeline`: draw so many of each, and keep what scores best.
            guidance_scale: classifier-free guidance, at least 0; 1 switches it off. It grows linearly over the scales, from
                none, to this at the last; the official `cfg` is one less. None: the checkpoint's default, as for `temperature`,
                `top_k` and `top_p`.
            negative_prompt: what guidance leads away from, instead of the null caption; one for all prompts, or one for each.
            accelerator: name of a preset (`vargen info presets` lists them), or a `ScaleSchedule`.
            generator, prompt_embeds, prompt_mask, negative_prompt_embeds, negative_prompt_mask: as of `LlamaGenPipeline`.
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"` for the tokens.
            return_dict: False returns `(images,)`.
            callback_on_step_end: called as `f(pipe, step, tokens_drawn, {"latents": tokens})` after every pass;
                `pipe.preview(tokens, tokens_drawn)` shows what is there. It may change the tokens of the scale that was drawn
                last. Returning `{"stop": True}`, or setting `pipe._interrupt`, ends the run with what is drawn.
            compile: run the passes through `torch.compile`; the first call takes minutes. Not on a CPU, where it does not pay.
            clean_prompt: clean the prompt as official text models were trained (needs ftfy and beautifulsoup4).

        Raises:
            ValueError, TypeError: for bad arguments, naming the argument, the value and what is allowed.
            NonFiniteLogitsError: if the model returns NaN or infinite logits. NonFinitePixelsError: likewise the tokenizer.
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
                given=[tokens[chosen] for tokens in kept],
                keep=keep and keep.rows(chosen),
                callback=callback,
            )

        return drawn(self, request, scale, run, callback_on_step_end, output_type, return_dict)

    def scale_model(self, guidance_scale: float, negative: Condition | None = None, compile: bool = False) -> VARScaleModel:
        """The transformer, and the one it may draft with, as `vargen.decoding.decode_scales` sees them; arguments as in a
        call."""
        scale, quantiser = checks.check_guidance(guidance_scale), self._quantiser()
        device = self._device_of(self.transformer)
        draft = self.draft_transformer
        small = None if draft is None else VARScaleModel(draft, quantiser, scale, negative, device=device)
        step = self._step() if compile else None
        return VARScaleModel(self.transformer, quantiser, scale, negative, step, small, device)

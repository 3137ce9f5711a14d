"""Image pipelines: their call, with batches and the best of several candidates; those of token models."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding import Accelerator, DecodeOutput, DecodeStats, Progress, Sampling, ScaleSchedule
from vargen.decoding.decode import compute_log_probs
from vargen.models.guidance import Guidance
from vargen.pipelines import validation
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.images import (
    ImagePipelineOutput,
    validate_decode_arguments,
    validate_source,
)
from vargen.pipelines.prompts import scorer_prompts
from vargen.pipelines.regeneration import CallRecord
from vargen.pipelines.seeds import ImageSeeds, resolve_seeds
from vargen.scoring.protocol import Scorer, score_images

logger = logging.getLogger("vargen")

OnStepEnd = Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True)
class ImageRequest:
    """What a call generates, with validated arguments and encoded prompts.

    Attributes:
        method: an `Accelerator` or a `ScaleSchedule`.
        condition: a `Condition` or `PromptRows`, with its negative; one row per image to generate, candidates included.
        seeds: one per image to generate, of which `num_candidates` belong to each image that is returned.
        batch_size: maximum number of images to generate at a time; None: all.
        fixed: tokens that are kept from a source image; see `vargen.pipelines.images.FixedTokens`.
    """

    method: Any
    condition: Any
    guidance: Guidance
    sampling: Sampling
    seeds: ImageSeeds
    num_candidates: int = 1
    batch_size: int | None = None
    fixed: Any = None

    def select_rows(self, rows: slice) -> ImageRequest:
        """Return the request for some of the images to generate."""
        return replace(
            self,
            condition=self.condition.select_rows(rows),
            seeds=self.seeds.select_rows(rows),
            fixed=self.fixed and self.fixed.select_rows(rows),
        )


class ImagePipeline(VisualPipeline):
    """Base of pipelines that generate images, with the call of all of them.

    Attributes:
        own_arguments: those of `image`, `mask_image`, `strength`, `guidance_interval` and `return_log_probs` that it has.
        recorded_arguments: those of the family alone that an image carries.
    """

    own_arguments: ClassVar[tuple[str, ...]] = ()
    recorded_arguments: ClassVar[tuple[str, ...]] = ()
    image_processor: Any = None

    @torch.no_grad()
    @without_autocast
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        image: Any = None,
        mask_image: Any = None,
        strength: float | None = None,
        class_labels: int | str | list[int | str] | Tensor | None = None,
        num_images_per_prompt: int = 1,
        batch_size: int | None = None,
        guidance_scale: float | None = None,
        guidance_interval: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        negative_prompt: str | list[str] | None = None,
        accelerator: str | Accelerator | ScaleSchedule | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_mask: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_mask: Tensor | None = None,
        num_candidates: int = 1,
        scorer: str | Scorer | Callable[[Any, list[str]], Any] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: OnStepEnd | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        clean_prompt: bool = False,
        return_log_probs: bool = False,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Generate images.

        Args:
            prompt: one prompt or several; None for models of classes.
            image: source of a variation or, with `mask_image`, of inpainting, for next-scale models: PIL images, or a tensor
                `[N, 3, Y, X]`, float in [0, 1] or uint8, of the model's size. One for all prompts, or one per prompt.
            mask_image: white, 1 or True in the area to inpaint, or transparent if parts of the mask are; PIL images, bool,
                uint8, or numbers in [0, 1]; see `vargen.pipelines.images.read_mask`. Pixels outside of it are those of
                `image`, but for a narrow transition at its border.
            strength: fraction of the scales to regenerate, from the finest down, in [0, 1]. Default: 0.8, and 1 with a mask.
            class_labels: one class or several, by number or, where the checkpoint has them, name, for models of classes.
            num_images_per_prompt: number of images per prompt or class.
            batch_size: maximum number of images to generate at a time; None: all. Each finished image makes room for the next
                one; those of next-scale models, whose passes differ in shape, are generated batch by batch.
            guidance_scale: scale of classifier-free guidance; 1 disables it. In next-scale models it grows linearly over the
                scales from none to this value; the official `cfg` is this value minus 1. None: the checkpoint's default; so
                for `temperature` (0 is greedy), `top_k` (0 keeps every token), `top_p` (in (0, 1]) and `min_p` (in [0, 1]).
            guidance_interval: last decoding step with guidance; None guides all steps. For next-token models.
            negative_prompt: replaces the null caption in guidance; one for all prompts, or one per prompt.
            accelerator: name of a preset (`vargen info presets` lists them), an `Accelerator` or a `ScaleSchedule`. None: the
                pipeline's `default_method`, for next-token models `"auto"`: it drafts as many tokens as is fastest, and
                generates the same image as `"ar"` in float32. In bfloat16 a wide pass rounds differently.
            generator: a `torch.Generator` for all images in turn (None: torch's global one), or a list with one per image, on
                which alone an image depends. A new generator on the same device with the seed `stats.seeds[i]` reproduces image
                i on its own: the seed that was passed, or another if the generator had been used before.
            prompt_embeds, prompt_mask: caption features `[B, P, C]`, valid rows last, and their mask `[B, P]`, instead of a
                prompt; not for models of transformers.
            negative_prompt_embeds, negative_prompt_mask: the same for the negative prompt; B is 1 or the number of prompts.
            num_candidates: number of candidates generated per image, of which the `scorer` selects the best. `stats.scores` has
                the scores of all candidates.
            scorer: a name that `vargen eval` accepts, such as `"emoji-scorer"`; a `Scorer` of `vargen.scoring`; or a function
                of images (a float tensor `[N, 3, Y, X]` in [0, 1]) and prompts that returns N numbers, higher is better.
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"` for the tokens.
            return_dict: False returns `(images,)`.
            callback_on_step_end: called as `f(pipe, step, count, {"latents": tokens})` after every pass; `pipe.preview(tokens,
                count)` returns the partial image. Returning `{"stop": True}`, or setting `pipe._interrupt`, ends the call.
            clean_prompt: clean the prompt as in the training of official LlamaGen text models (needs ftfy and beautifulsoup4).
            return_log_probs: also return log-probabilities of the tokens, if the call is not stopped; see
                `vargen.decoding.decode.compute_log_probs`. For next-token models.

        Raises:
            NonFiniteLogitsError, NonFinitePixelsError, NonFiniteScoreError: for NaN or infinite logits, pixels or scores.
        """
        own = {"image": image, "mask_image": mask_image, "strength": strength, "guidance_interval": guidance_interval}
        for name, value in {**own, "return_log_probs": return_log_probs or None}.items():
            if value is not None and name not in self.own_arguments:
                other = "emoji" if name in NextTokenPipeline.own_arguments else "emoji-var"
                raise TypeError(f"{name} must be left out: a {type(self).__name__} cannot take it; {other} can")
        scorer = self.check_inputs(
            output_type, callback_on_step_end, callback_on_step_end_tensor_inputs, num_candidates, scorer, batch_size
        )
        method = self.resolve_method(self.default_method if accelerator is None else accelerator)
        source = validate_source(image, mask_image, strength, self.image_size or 0, self.image_processor)
        guidance, sampling = self.resolve_sampling(
            guidance_interval,
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        condition, num_prompts = self.encode_condition(
            prompt,
            class_labels=class_labels,
            prompt_embeds=prompt_embeds,
            prompt_mask=prompt_mask,
            negative_prompt=negative_prompt,
            negative_prompt_embeds=negative_prompt_embeds,
            negative_prompt_mask=negative_prompt_mask,
            clean_prompt=clean_prompt,
        )
        texts = () if scorer is None else scorer_prompts(self, prompt, condition)
        num_images_per_prompt = validation.validate_num_images(num_images_per_prompt, num_prompts, num_candidates)
        seeds = resolve_seeds(generator, num_prompts * num_images_per_prompt)
        seeds = seeds if num_candidates == 1 else seeds.for_candidates(num_candidates)
        condition = condition.repeat(num_images_per_prompt * num_candidates)
        request = ImageRequest(method, condition, guidance, sampling, seeds, num_candidates, batch_size)
        if source is not None:
            request = replace(request, fixed=self._encode_source(source, num_prompts, len(request.seeds.seeds)))
        with self._engines.freed_without_memory():
            result = self._generate(request, callback_on_step_end)
            if scorer is not None:
                result = self._select_candidates(result, request, scorer, texts)
            masked = source if source is not None and source.mask is not None and output_type != "latent" else None
            length = result.length if result.stats.stopped else None
            images = self.decode_tokens(result.tokens, length, output_type if masked is None else "pt")
            if masked is not None:
                images = self.image_processor.postprocess(2 * masked.blend(images) - 1, output_type=output_type)
            log_probs: Sequence[Tensor] = ()
            if return_log_probs and return_dict and result.finished:
                log_probs = self._compute_log_probs(request, result.tokens)
        self.maybe_free_model_hooks()
        if self.summary is not None:
            self.summary.add(result.stats)
        if not return_dict:
            return (images,)
        output: Any = ImagePipelineOutput(images, result.stats, result.tokens, *log_probs)
        output._call = CallRecord.make(
            self, request, prompt, negative_prompt,
            clean_prompt=clean_prompt, negative_prompt_embeds=negative_prompt_embeds is not None,
            image=image is not None, mask=mask_image is not None, strength=source and source.strength,
        )  # fmt: skip
        return output

    def _generate(self, request: ImageRequest, on_step_end: OnStepEnd | None) -> DecodeOutput:
        """Generate the tokens of all images of a request, candidates included, in batches."""
        count = len(request.seeds.seeds)
        at_once = count if request.batch_size is None else min(request.batch_size, count)
        is_list = at_once < count and self.joins_running_batch
        with self._start_call() as call, self.progress_bar(total=self.num_tokens) as bar:

            def callback(progress: Progress) -> bool | None:
                # Where images begin one after another, the number of tokens is their mean, otherwise the smallest.
                num_tokens = int(progress.length.float().mean() if is_list else progress.length.amin())
                bar.update(num_tokens - bar.n)
                if on_step_end is None:
                    return not call.interrupted
                answer = on_step_end(self, progress.step - 1, num_tokens, {"latents": progress.tokens.clone()})
                return not (validation.wants_stop(answer) or call.interrupted)

            parts: list[DecodeOutput] = []
            step = count if is_list else at_once
            decode = self._engines.decode if self.joins_running_batch else self._engines.decode_scales
            for first in range(0, count, step):
                part = request if step == count else request.select_rows(slice(first, first + step))
                parts.append(decode(self, part, callback))
                if parts[-1].stats.stopped:
                    break
        result = parts[0] if len(parts) == 1 and len(parts[0].tokens) == count else _join_outputs(parts, count)
        result.stats.seeds = request.seeds.seeds
        return result

    def _select_candidates(
        self, result: DecodeOutput, request: ImageRequest, scorer: Scorer, prompts: Sequence[str]
    ) -> DecodeOutput:
        """Return the best candidate of each image; equally many belong to each of `prompts`."""
        count, stats = request.num_candidates, result.stats
        pixels = self.decode_tokens(result.tokens, result.length if stats.stopped else None, "pt")
        repeated = [prompt for prompt in prompts for _ in range(len(pixels) // len(prompts))]
        scores = score_images(scorer, pixels.float().cpu(), repeated).view(-1, count)
        best = scores.argmax(1) if scorer.higher_is_better else scores.argmin(1)
        selected = torch.arange(len(best)) * count + best
        stats.scorer, stats.scores = scorer.name, scores.tolist()
        seeds, rows = request.seeds.seeds, selected.to(result.tokens.device)
        stats.candidate_seeds = [seeds[i : i + count] for i in range(0, len(seeds), count)]
        stats.seeds = [seeds[i] for i in selected.tolist()]
        canvas = None if result.canvas is None else result.canvas[rows]
        return DecodeOutput(result.tokens[rows], result.length[rows], stats, canvas)

    def _compute_log_probs(self, request: ImageRequest, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the tokens of a request's images; see `compute_log_probs`."""
        if request.method.kind != "exact":
            name = request.method.name
            logger.warning("log-probabilities are those of the model; %s samples from another distribution", name)
        chosen = request.condition.select_rows(slice(None, None, request.num_candidates))
        model, at_once = self.decoding_model(request.guidance), request.batch_size or len(tokens)
        found = [
            compute_log_probs(model, chosen.select_rows(slice(first, first + at_once)), part, request.sampling)
            for first, part in zip(range(0, len(tokens), at_once), tokens.split(at_once), strict=True)
        ]
        log_probs, plain = (torch.cat(parts) for parts in zip(*found, strict=True))
        return log_probs, plain


class NextTokenPipeline(ImagePipeline):
    """Base of pipelines whose models predict one token after another."""

    paradigm: ClassVar[str] = "next-token"
    joins_running_batch: ClassVar[bool] = True
    num_baseline_passes: Any = property(attrgetter("num_tokens"))
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

    def mask_generated(self, length: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the pixels that the first `length` `[B]` tokens determine, bool `[B, 1, Y, X]`."""
        generated = torch.arange(self.num_tokens, device=length.device) < length[:, None]
        return F.interpolate(generated.view(-1, 1, *self.grid).float(), size).bool()

    def preview(self, tokens: Tensor, num_tokens: int) -> list[Image.Image]:
        images, length = self.decode_tokens(tokens), torch.tensor([num_tokens])
        for image in images:
            mask = self.mask_generated(length, (image.height, image.width))[0, 0]
            image.putalpha(Image.fromarray(mask.numpy().astype("uint8") * 255))
        return images


def _join_outputs(parts: list[DecodeOutput], images: int) -> DecodeOutput:
    """Join the outputs of consecutive rows; rows after a stop are empty."""
    tokens, length = torch.cat([part.tokens for part in parts]), torch.cat([part.length for part in parts])
    tokens, length = (torch.cat([x, x.new_zeros(images - len(x), *x.shape[1:])]) for x in (tokens, length))
    return DecodeOutput(tokens, length, DecodeStats.merge([part.stats for part in parts]))

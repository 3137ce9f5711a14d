"""The call of token models: LlamaGen, and image language models of transformers."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding import DEFAULT_METHOD, Accelerator, DecodeOutput
from vargen.decoding.decode import compute_log_probs
from vargen.pipelines import validation
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.generation import ImageRequest, generate_tokens, select_candidates
from vargen.pipelines.images import ImagePipelineOutput, validate_decode_arguments
from vargen.pipelines.prompts import scorer_prompts
from vargen.pipelines.regeneration import CallRecord
from vargen.scoring.protocol import Scorer

logger = logging.getLogger("vargen")


class NextTokenPipeline(VisualPipeline):
    """Base of pipelines whose models predict one token after another."""

    paradigm: ClassVar[str] = "next-token"
    output_class: ClassVar[Any] = ImagePipelineOutput

    @torch.no_grad()
    @without_autocast
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        class_labels: int | str | list[int | str] | Tensor | None = None,
        num_images_per_prompt: int = 1,
        batch_size: int | None = None,
        guidance_scale: float | None = None,
        guidance_interval: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        negative_prompt: str | list[str] | None = None,
        accelerator: str | Accelerator = DEFAULT_METHOD,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_mask: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_mask: Tensor | None = None,
        num_candidates: int = 1,
        scorer: str | Scorer | Callable[[Any, list[str]], Any] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        clean_prompt: bool = False,
        return_log_probs: bool = False,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Generate images.

        Args:
            prompt: one prompt or several; None for models of classes.
            class_labels: one class or several, by number or, where the checkpoint has them, name, for models of classes.
            num_images_per_prompt: number of images per prompt or class.
            batch_size: maximum number of images to generate at a time; None generates all at once. If there are more, each
                finished image makes room for the next one, so that none waits for the slowest.
            guidance_scale: scale of classifier-free guidance, at least 0; 1 disables it. None: the checkpoint's default; so for
                `temperature` (at least 0; 0 is greedy), `top_k` (up to the vocabulary size; 0 keeps every token) and
                `top_p` (in (0, 1]).
            guidance_interval: last decoding step with guidance; None guides all steps.
            negative_prompt: replaces the null caption in guidance; one for all prompts, or one per prompt. Models that guide
                with a prompt of their own take none.
            accelerator: name of a preset (`vargen info presets` lists them), or an `Accelerator`. The default, `"auto"`, drafts
                as many tokens as is fastest, and generates the same image as `"ar"` in float32. In bfloat16 a wide pass
                rounds differently.
            generator: a `torch.Generator`, or a list with one per image. Image i of a list depends only on its own generator. A
                single generator, or torch's global one for None, is used for all images in turn. In each case, a new generator
                on the same device with the seed `stats.seeds[i]` reproduces image i on its own. This seed is the one that was
                passed, or a new one if the generator had been used before.
            prompt_embeds, prompt_mask: caption features `[B, P, C]`, valid rows last, and their mask (a tensor, an array or
                nested lists), instead of a prompt; not for models of transformers.
            negative_prompt_embeds, negative_prompt_mask: the same for the negative prompt; B is 1 or the number of prompts.
            num_candidates: number of candidates generated per image, of which the `scorer` selects the best. `stats.scores` has
                the scores of all candidates.
            scorer: a name that `vargen eval` accepts, such as `"emoji-scorer"`; a `Scorer` of `vargen.scoring`; or a function
                of images (a float tensor `[N, 3, Y, X]` in [0, 1]) and prompts that returns N numbers, higher is better. With
                one candidate, it scores the image without selecting.
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"` for the tokens.
            return_dict: False returns `(images,)`.
            callback_on_step_end: called as `f(pipe, step, tokens_drawn, {"latents": tokens})` after every pass.
                Returning `{"stop": True}`, or setting `pipe._interrupt`, ends the call with the tokens generated so far.
            clean_prompt: clean the prompt as in the training of official LlamaGen text models (needs ftfy and beautifulsoup4).

            return_log_probs: also return log-probabilities of the tokens, if the call is not stopped; see
                `vargen.decoding.decode.compute_log_probs`.

        Raises:
            ValueError, TypeError: for invalid arguments, naming the argument, its value and what is allowed.
            NonFiniteLogitsError: if the transformer returns NaN or infinite logits.
            NonFinitePixelsError: if the tokenizer returns NaN or infinite pixels.
            NonFiniteScoreError: if the scorer returns NaN or infinite scores.
        """
        scorer = self.check_inputs(
            output_type, callback_on_step_end, callback_on_step_end_tensor_inputs, num_candidates, scorer, batch_size
        )
        method = self.resolve_method(accelerator)
        guidance, sampling = self.resolve_sampling(
            guidance_interval, guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p
        )
        num_images_per_prompt = validation.validate_num_images(num_images_per_prompt, 1)
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
        texts = () if scorer is None else scorer_prompts(self, prompt, condition, num_images_per_prompt)
        request = ImageRequest.build(
            method,
            condition,
            num_prompts,
            guidance,
            sampling,
            num_images_per_prompt=num_images_per_prompt,
            num_candidates=num_candidates,
            generator=generator,
            batch_size=batch_size,
        )
        with self._engines.freed_without_memory():
            result = generate_tokens(self, request, callback_on_step_end)
            if scorer is not None:
                result = select_candidates(self, result, request, scorer, texts)
            images = self.decode_tokens(result.tokens, result.length if result.stats.stopped else None, output_type)
            log_probs: Sequence[Tensor] = ()
            if return_log_probs and return_dict and result.finished:
                log_probs = self._compute_log_probs(request, result.tokens)
        self.maybe_free_model_hooks()
        if not return_dict:
            return (images,)
        output = self.output_class(images, result.stats, result.tokens, *log_probs)
        output._call = CallRecord.make(
            self, request, prompt, negative_prompt,
            clean_prompt=clean_prompt, negative_prompt_embeds=negative_prompt_embeds is not None,
        )  # fmt: skip
        return output

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

    # -- tokens to images -----------------------------------------------------------------------------------------------

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

    def joins_running_batch(self, method: Accelerator) -> bool:
        return True

    def _decode(self, request: ImageRequest, callback: Any) -> DecodeOutput:
        return self._engines.decode(self, request, callback)

    @property
    def num_baseline_passes(self) -> int:
        return self.num_tokens

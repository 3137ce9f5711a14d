"""The course of a call: its request, candidates, batches, callbacks and interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vargen.decoding import DecodeOutput, DecodeStats, Progress, Sampling
from vargen.models.guidance import Guidance
from vargen.pipelines import validation
from vargen.pipelines.prompts import PromptInputs, scorer_prompts
from vargen.pipelines.seeds import ImageSeeds, resolve_seeds
from vargen.pipelines.validation import MAX_IMAGES
from vargen.scoring.protocol import Scorer, score_images, to_scorer
from vargen.values import parse_int, short_repr

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline

OnStepEnd = Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None]


# -- the request ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputOptions:
    """Arguments of a pipeline's `__call__` that do not change what is generated."""

    output_type: str = "pil"
    return_dict: bool = True
    callback: OnStepEnd | None = None
    return_log_probs: bool = False

    @classmethod
    def build(
        cls, pipe: VisualPipeline, output_type: Any, return_dict: bool, callback: Any, tensor_inputs: Any
    ) -> OutputOptions:
        """Validate the arguments of a call. Raises ValueError or TypeError for invalid ones, or a pipeline without networks."""
        if pipe.transformer is None or getattr(pipe, pipe.pixel_decoder) is None:
            missing = f"transformer or {pipe.pixel_decoder}"
            raise ValueError(f"this pipeline was loaded without a {missing}: it only encodes prompts")
        validation.validate_output_type(output_type)
        validation.validate_callback(callback, tensor_inputs, pipe._callback_tensor_inputs)
        return cls(output_type, return_dict, callback)


@dataclass(frozen=True)
class GenerationRequest:
    """A call with validated arguments and encoded prompts.

    Attributes:
        method: an `Accelerator` or a `ScaleSchedule`.
        condition: a `Condition` or `PromptRows`, with its negative; one row per image to generate, candidates included.
        guidance: classifier-free guidance.
        seeds: one per generated image.
        num_prompts: number of prompts or classes.
        selection: how one of several candidates is selected.
        scorer_prompts: one text per image, not repeated for its candidates; empty without a scorer.
        fixed: tokens that are kept from a source image; see `vargen.pipelines.images.FixedTokens`.
        batch_size: maximum number of images to generate at a time; None: all.
        output: form of the result.
    """

    method: Any
    condition: Any
    guidance: Guidance
    seeds: ImageSeeds
    sampling: Sampling
    num_prompts: int
    selection: CandidateSelection
    scorer_prompts: Sequence[str]
    output: OutputOptions
    batch_size: int | None = None
    fixed: Any = None

    @classmethod
    def build(
        cls,
        pipe: VisualPipeline,
        method: Any,
        inputs: PromptInputs,
        negative: PromptInputs,
        settings: Mapping[str, Any],
        selection: CandidateSelection,
        output: OutputOptions,
        *,
        num_images_per_prompt: int,
        generator: Any,
        guidance_interval: int | None = None,
        batch_size: int | None = None,
    ) -> GenerationRequest:
        """Validate the arguments of an image pipeline's call, encode its conditions, and resolve its seeds.

        Args:
            inputs, negative: the condition, and the negative condition of guidance.
            settings: guidance scale, temperature, top-k and top-p; None selects the checkpoint's default.
            num_images_per_prompt, generator, guidance_interval, batch_size: arguments of the call.
        """
        if validation.is_blank(negative.prompt):
            negative = negative._replace(prompt=None)
        else:
            validation.validate_prompts(negative.prompt, "negative_prompt")
        given = {name: value for name, value in settings.items() if value is not None}
        scale, sampling = validation.validate_sampling({**pipe.default_sampling, **given})
        sampling.validate_top_k(pipe.vocab_size)
        interval = validation.validate_guidance_interval(guidance_interval)
        per_prompt = validation.validate_num_images(num_images_per_prompt, 1)
        condition, num_prompts = pipe._encode_request(inputs, negative)
        images = num_prompts * validation.validate_num_images(per_prompt, num_prompts)
        selection.validate_num_images(images)
        if batch_size is not None:
            batch_size = validation.validate_batch_size(batch_size, "batch_size")
        texts = () if selection.scorer is None else scorer_prompts(pipe, inputs.prompt, condition)
        seeds = resolve_seeds(generator, images).for_candidates(selection.num_candidates)
        rows = images * selection.num_candidates
        return cls(
            method,
            condition.repeat(rows // num_prompts),
            Guidance(scale, interval),
            seeds,
            sampling,
            num_prompts,
            selection,
            [text for text in texts for _ in range(per_prompt)],
            output,
            batch_size,
        )

    @property
    def num_images(self) -> int:
        """Number of images to generate, including candidates."""
        return len(self.seeds.seeds)

    def select_rows(self, rows: slice) -> GenerationRequest:
        """Return the request for some of the images to generate."""
        return replace(
            self,
            condition=self.condition.select_rows(rows),
            seeds=self.seeds.select_rows(rows),
            fixed=self.fixed and self.fixed.select_rows(rows),
        )


def run_request(pipe: VisualPipeline, request: GenerationRequest) -> Any:
    """Generate what a call requests. Returns the pipeline's output, or `(images,)`."""
    with pipe._calls.start() as call, pipe.progress_bar(total=pipe.num_tokens) as bar:
        try:
            output = pipe._generate(request, call, bar)
        except torch.OutOfMemoryError:
            pipe._engines.clear()  # so that the next call has their memory
            raise
    pipe.maybe_free_model_hooks()
    return output if request.output.return_dict else (output[0],)


def generate_images(pipe: VisualPipeline, request: GenerationRequest, call: RunningCall, bar: Any) -> tuple[Any, DecodeOutput]:
    """Generate the requested images and select among candidates. Returns the images in the requested form, and their tokens."""

    def to_images(result: DecodeOutput, output_type: str) -> Any:
        return pipe.decode_tokens(result.tokens, result.length if result.stats.stopped else None, output_type)

    images = request.num_images
    at_once = images if request.batch_size is None else min(request.batch_size, images)
    is_list = at_once < images and pipe.joins_running_batch(request.method)
    callback = _step_callback(pipe, call, bar, request.output.callback, is_list)
    parts: list[DecodeOutput] = []
    step = images if is_list else at_once
    for first in range(0, images, step):
        rows = slice(first, min(first + step, images))
        parts.append(pipe._decode(request.select_rows(rows), callback))
        if parts[-1].stats.stopped:
            break
    result = _join_outputs(parts, request.num_images)
    result.stats.seeds = request.seeds.seeds
    if request.selection.scorer is not None:
        result = request.selection.select(result, request.seeds, to_images(result, "pt"), request.scorer_prompts)
    return to_images(result, request.output.output_type), result


def _step_callback(
    pipe: VisualPipeline, call: RunningCall, bar: Any, on_step_end: OnStepEnd | None, is_list: bool
) -> Callable[[Progress], bool | None]:
    """Return a callback that updates the progress bar and calls the user's callback with the arguments of diffusers.

    Args:
        is_list: whether images begin one after another. The number of tokens is then their mean, otherwise the smallest.
    """

    def callback(progress: Progress) -> bool | None:
        num_tokens = int(progress.length.float().mean() if is_list else progress.length.amin())
        bar.update(num_tokens - bar.n)
        if on_step_end is None:
            return not call.interrupted
        answer = on_step_end(pipe, progress.step - 1, num_tokens, {"latents": progress.tokens.clone()})
        return not (validation.wants_stop(answer) or call.interrupted)

    return callback


def _join_outputs(parts: list[DecodeOutput], images: int) -> DecodeOutput:
    """Join the outputs of consecutive rows; rows that are missing because a callback stopped the call are empty."""
    if len(parts) == 1 and len(parts[0].tokens) == images:
        return parts[0]
    tokens, length = torch.cat([part.tokens for part in parts]), torch.cat([part.length for part in parts])
    tokens, length = (torch.cat([x, x.new_zeros(images - len(x), *x.shape[1:])]) for x in (tokens, length))
    stats = DecodeStats.merge([part.stats for part in parts])
    return DecodeOutput(tokens, length, stats)


# -- candidates -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CandidateSelection:
    """How many candidates to generate per image, and the scorer that selects one; see `pipe(num_candidates=, scorer=)`."""

    num_candidates: int = 1
    scorer: Scorer | None = None

    @classmethod
    def build(cls, num_candidates: Any, scorer: Any, load: Callable[[str], Scorer]) -> CandidateSelection:
        """Validate the arguments of a call. `load` loads a scorer by name."""
        count = parse_int(num_candidates, 1)
        if count is None:
            raise ValueError(f"num_candidates must be a whole number of at least 1, got {short_repr(num_candidates)}")
        if scorer is None and count > 1:
            raise ValueError(f"scorer must be given to choose among {count} candidates: a name, a Scorer or f(images, prompts)")
        if scorer is None:
            return cls(count)
        return cls(count, load(scorer) if isinstance(scorer, str) else to_scorer(scorer))

    def validate_num_images(self, images: int) -> None:
        """Raise ValueError if a call for this many images exceeds the limit of `MAX_IMAGES` candidates."""
        if images * self.num_candidates > MAX_IMAGES:
            raise ValueError(
                f"num_candidates must be less: one call generates at most {MAX_IMAGES} images, got {images} x "
                f"{self.num_candidates} candidates"
            )

    def select(self, result: DecodeOutput, seeds: ImageSeeds, images: Tensor, prompts: Sequence[str]) -> DecodeOutput:
        """Select the best candidate of each image, and record all scores and seeds in the statistics.

        Args:
            result: output for all candidates, grouped by image.
            images: the candidates' pixels, float `[N, 3, Y, X]` in [0, 1], in the same order.
            prompts: one per image, not repeated for its candidates.

        Returns:
            The rows of the selected candidates.
        """
        assert self.scorer is not None
        count = self.num_candidates
        repeated = [prompt for prompt in prompts for _ in range(count)]
        scores = score_images(self.scorer, images.float().cpu(), repeated).view(-1, count)
        best = scores.argmax(1) if self.scorer.higher_is_better else scores.argmin(1)
        selected = torch.arange(len(best)) * count + best
        stats, rows = result.stats, selected.to(result.tokens.device)
        stats.scorer, stats.scores = self.scorer.name, scores.tolist()
        stats.candidate_seeds = [seeds.seeds[i : i + count] for i in range(0, len(seeds.seeds), count)]
        stats.seeds = [seeds.seeds[i] for i in selected.tolist()]
        canvas = None if result.canvas is None else result.canvas[rows]
        return DecodeOutput(result.tokens[rows], result.length[rows], stats, canvas)


# -- interrupts -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class RunningCall:
    """A running call: its thread, and whether it was interrupted."""

    thread: int
    interrupted: bool = False


class RunningCalls:
    """The running calls of a pipeline, so that an interrupt ends the right one. A copy of the pipeline starts with none."""

    def __init__(self) -> None:
        self._calls: list[RunningCall] = []

    def __reduce__(self) -> tuple[type[RunningCalls], tuple[()]]:
        return RunningCalls, ()

    @contextmanager
    def start(self) -> Iterator[RunningCall]:
        """Register a call of this thread while the block runs."""
        call = RunningCall(threading.get_ident())
        self._calls.append(call)
        try:
            yield call
        finally:
            self._calls.remove(call)

    def current(self) -> list[RunningCall]:
        """The innermost call of this thread; in a thread without one, all running calls."""
        calls = list(self._calls)
        return [call for call in calls if call.thread == threading.get_ident()][-1:] or calls

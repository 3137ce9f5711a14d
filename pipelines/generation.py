"""The course of an image pipeline's call: request, candidate selection, out-of-memory handling, callbacks and output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vargen.decoding import DecodeOutput, DecodeStats, Progress, Sampling
from vargen.device import check_compile
from vargen.models.condition import Condition
from vargen.pipelines import validation as checks
from vargen.pipelines.calls import Call
from vargen.pipelines.prompts import repeat_condition
from vargen.pipelines.validation import MAX_IMAGES, ImageSeeds
from vargen.scoring.protocol import Scorer, score_images, to_scorer
from vargen.values import parse_int, short_repr

logger = logging.getLogger("vargen")
_ALLOCATORS = ("can't allocate memory", "not enough memory", "os error 12", "Cannot allocate memory")  # torch, safetensors


@contextmanager
def loading_memory(folder: Path) -> Iterator[None]:
    """Report an out-of-memory error while the block loads a folder's weights, with the size of the weights.

    Raises:
        MemoryError: with the folder and the size of its weight files in bytes.
    """
    try:
        yield
    except Exception as error:
        if not _ran_out(error):
            raise
        size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        raise MemoryError(
            f"memory does not suffice to load {folder}, whose weight files are {size:,} bytes; "
            "close other programs, or use a smaller model or dtype"
        ) from error


def _ran_out(error: BaseException | None) -> bool:
    """Whether the error or one of its causes is out-of-memory; diffusers reports every error as an unreadable file."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(said in str(error) for said in _ALLOCATORS):
            return True
        error = error.__cause__ or error.__context__
    return False


def within_memory(run: Callable[[slice], DecodeOutput], images: int) -> DecodeOutput:
    """Generate all images in one batch or, if memory does not suffice, in two batches of half the size.

    Raises:
        torch.OutOfMemoryError: if half of the images do not fit either.
    """
    try:
        return run(slice(0, images))
    except torch.OutOfMemoryError as error:
        if images == 1:
            raise torch.OutOfMemoryError("out of memory with one image; use a smaller model or dtype") from error
    # Outside the handler, because the traceback keeps the tensors of the failed attempt alive.
    logger.warning("out of memory with %d images at once: drawing them in two halves", images)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = images // 2
    parts: list[DecodeOutput] = []
    for chosen in (slice(0, half), slice(half, images)):
        try:
            parts.append(run(chosen))
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"out of memory with {images} images at once, and with {half}; make fewer per call (num_images_per_prompt, "
                "prompts)"
            ) from error
        if parts[-1].stats.stopped:
            break
    tokens, length = torch.cat([part.tokens for part in parts]), torch.cat([part.length for part in parts])
    missing = images - len(tokens)  # images of the second half, if a callback stopped the first
    tokens, length = (torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) for x in (tokens, length))
    return DecodeOutput(tokens, length, DecodeStats.merge([part.stats for part in parts]), all(part.finished for part in parts))


@dataclass(frozen=True)
class CandidateSelection:
    """How many candidates to generate per image, and the scorer that selects one; see `pipe(num_candidates=, scorer=)`."""

    count: int = 1
    scorer: Scorer | None = None

    @classmethod
    def checked(cls, num_candidates: Any, scorer: Any, named: Callable[[str], Scorer]) -> CandidateSelection:
        """Build the selection from a call's arguments.

        Args:
            named: loads a scorer by name.

        Raises:
            ValueError: for an invalid number of candidates, several candidates without a scorer, or an unknown scorer.
            TypeError: for a scorer that is not a name, a `Scorer` or a function.
        """
        count = parse_int(num_candidates, 1)
        if count is None:
            raise ValueError(f"num_candidates must be a whole number of at least 1, got {short_repr(num_candidates)}")
        if scorer is None and count > 1:
            raise ValueError(f"scorer must be given to choose among {count} candidates: a name, a Scorer or f(images, prompts)")
        if scorer is None:
            return cls(count)
        return cls(count, named(scorer) if isinstance(scorer, str) else to_scorer(scorer))

    def check_images(self, images: int) -> None:
        """Raise ValueError if a call for this many images exceeds the limit of `MAX_IMAGES` candidates."""
        if images * self.count > MAX_IMAGES:
            raise ValueError(
                f"one call draws at most {MAX_IMAGES} images, got {images} x {self.count} candidates (num_candidates)"
            )

    def choose(self, result: DecodeOutput, seeds: ImageSeeds, pictures: Tensor, texts: Sequence[str]) -> DecodeOutput:
        """Select the best candidate of each image, and record all scores and seeds in the statistics.

        Args:
            result: output for all candidates, grouped by image.
            pictures: the candidates' pixels, float `[N, 3, Y, X]` in [0, 1], in the same order.
            texts: one prompt per image, not repeated for its candidates.

        Returns:
            The rows of the selected candidates.

        Raises:
            NonFiniteScoreError: for a score that is NaN or infinite.
        """
        assert self.scorer is not None
        prompts = [text for text in texts for _ in range(self.count)]
        scores = score_images(self.scorer, pictures.float().cpu(), prompts).view(-1, self.count)
        best = scores.argmax(1) if self.scorer.higher_is_better else scores.argmin(1)
        chosen = torch.arange(len(best)) * self.count + best
        stats, rows = result.stats, chosen.to(result.tokens.device)
        stats.scorer, stats.scores = self.scorer.name, scores.tolist()
        asked = seeds.asked
        stats.candidate_seeds = [asked[i : i + self.count] for i in range(0, len(asked), self.count)]
        stats.seeds = [asked[i] for i in chosen.tolist()]
        canvas = None if result.canvas is None else result.canvas[rows]
        return DecodeOutput(result.tokens[rows], result.length[rows], stats, result.finished, canvas)


if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline

OnStepEnd = Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None]


class PromptInputs(NamedTuple):
    """A call's arguments that define the condition, or the negative condition; see a pipeline's `__call__`."""

    prompt: Any = None
    embeds: Any = None
    mask: Any = None
    class_labels: Any = None


@dataclass(frozen=True)
class GenerationRequest:
    """A call with validated arguments and encoded prompts.

    Attributes:
        prompts: number of prompts or classes.
        drawn: number of images to generate, including candidates.
        condition: one row per generated image.
        negative: negative condition with one row per generated image, or None.
        texts: text for the scorer, one per image; empty without a scorer.
    """

    prompts: int
    drawn: int
    condition: Condition
    negative: Condition | None
    seeds: ImageSeeds
    best: CandidateSelection
    texts: list[str]


def check_call(
    pipe: VisualPipeline, output_type: Any, compile: bool, on_step_end: Any, tensor_inputs: Any, negative_prompt: Any
) -> None:
    """Raise ValueError or TypeError for invalid arguments of a call, before any prompt is encoded."""
    if pipe.transformer is None or pipe.vqvae is None:
        raise ValueError("this pipeline was loaded without a transformer or vqvae: it only encodes prompts")
    checks.check_output_type(output_type)
    check_compile(compile, pipe._device_of(pipe.transformer))
    checks.check_callback(on_step_end, tensor_inputs, pipe._callback_tensor_inputs)
    if negative_prompt is not None:
        checks.check_prompts(negative_prompt, "negative_prompt")


def resolve_sampling(pipe: VisualPipeline, given: dict[str, Any]) -> tuple[float, Sampling]:
    """Return the guidance scale and the sampling settings of a call; None selects the checkpoint's default.

    Raises:
        ValueError, TypeError: for a value out of range; the message names the argument.
    """
    scale, sampling = checks.check_sampling({**pipe.default_sampling, **{k: v for k, v in given.items() if v is not None}})
    sampling.validate_top_k(pipe.vocab)
    return scale, sampling


def requested(
    pipe: VisualPipeline,
    asked: PromptInputs,
    unwanted: PromptInputs,
    per_prompt: int,
    generator: Any,
    best: CandidateSelection,
    clean: bool,
) -> GenerationRequest:
    """Validate and encode a call's conditions, and resolve its seeds.

    Args:
        asked: the condition.
        unwanted: the negative condition of guidance.
        per_prompt: images per prompt.
        generator, clean: arguments of the call.

    Raises:
        ValueError, TypeError: before any image is generated, for invalid conditions, generators or numbers of images.
    """
    per_prompt = checks.check_count(per_prompt, 1)
    condition, prompts = pipe.condition(asked.prompt, asked.class_labels, asked.embeds, asked.mask, clean)
    images = prompts * checks.check_count(per_prompt, prompts)
    best.check_images(images)
    texts = [] if best.scorer is None else pipe.scored_texts(asked.prompt, condition)
    seeds, drawn = checks.resolve_seeds(generator, images).candidates(best.count), images * best.count
    negative = pipe.negative_condition(unwanted.prompt, unwanted.embeds, unwanted.mask, clean, prompts, drawn)
    texts = [text for text in texts for _ in range(per_prompt)]
    return GenerationRequest(prompts, drawn, repeat_condition(condition, drawn // prompts), negative, seeds, best, texts)


def drawn(
    pipe: VisualPipeline,
    request: GenerationRequest,
    guidance_scale: float,
    run: Callable[[slice, Callable[[Progress], bool | None]], DecodeOutput],
    on_step_end: OnStepEnd | None,
    output_type: str,
    return_dict: bool,
) -> Any:
    """Generate the requested images.

    Args:
        run: generates the tokens of a slice of the request's rows, with a callback.
        on_step_end: callback of the call.

    Returns:
        The pipeline's `output`, or `(images,)`.
    """
    with pipe._calls.started(guidance_scale, pipe.steps) as call, pipe.progress_bar(total=pipe.tokens) as bar:
        callback = _callback(pipe, call, bar, on_step_end)
        result = within_memory(lambda chosen: run(chosen, callback), request.drawn)
    result.stats.seeds = request.seeds.asked
    if request.best.scorer is not None:
        result = request.best.choose(result, request.seeds, _pictures(pipe, result, "pt"), request.texts)
    images = _pictures(pipe, result, output_type)
    pipe.maybe_free_model_hooks()
    return pipe.output(images=images, stats=result.stats) if return_dict else (images,)


def _pictures(pipe: VisualPipeline, result: DecodeOutput, output_type: str) -> Any:
    return pipe.decode_tokens(result.tokens, result.length if result.stats.stopped else None, output_type)


def _callback(pipe: VisualPipeline, call: Call, bar: Any, on_step_end: OnStepEnd | None) -> Callable[[Progress], bool | None]:
    """Return a callback that updates the progress bar and calls the user's callback with the arguments of diffusers."""

    def callback(progress: Progress) -> bool | None:
        # Reading the length synchronizes with the device, so on CUDA it is read every 16 steps only.
        if progress.tokens.device.type == "cpu" or progress.step % 16 == 0 or on_step_end is not None:
            drawn = int(progress.length.amin())
            bar.update(drawn - bar.n)
        if on_step_end is None:
            return not call.interrupt
        left_out = progress.tokens < 0  # scales that the schedule skips
        answer = on_step_end(pipe, progress.step - 1, drawn, {"latents": progress.tokens})
        answer = checks.check_answer(answer, progress.tokens, pipe.vocab, left_out)
        latents = answer.get("latents")
        if latents is not None and latents is not progress.tokens:
            progress.tokens.copy_(latents)
        return not (answer.get("stop", False) or call.interrupt)

    return callback

"""How image pipelines carry out a call: a request is generated in batches, and the best candidates are selected.

The steps of a call are those of diffusers, in the `__call__` of a pipeline: check inputs, encode the prompt, resolve seeds,
generate tokens with the model of the paradigm, decode them, return the output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from vargen.decoding import DecodeOutput, DecodeStats, Progress, Sampling
from vargen.models.guidance import Guidance
from vargen.pipelines.seeds import ImageSeeds, resolve_seeds
from vargen.pipelines.validation import MAX_IMAGES, validate_num_images, wants_stop
from vargen.scoring.protocol import Scorer, score_images

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline

OnStepEnd = Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True)
class ImageRequest:
    """What a call generates, with validated arguments and encoded prompts.

    Attributes:
        method: an `Accelerator` or a `ScaleSchedule`.
        condition: a `Condition` or `PromptRows`, with its negative; one row per image to generate, candidates included.
        guidance, sampling: of all images.
        seeds: one per image to generate.
        num_candidates: number of images to generate for each image that is returned.
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

    @classmethod
    def build(
        cls,
        method: Any,
        condition: Any,
        num_prompts: int,
        guidance: Guidance,
        sampling: Sampling,
        *,
        num_images_per_prompt: int = 1,
        num_candidates: int = 1,
        generator: Any = None,
        batch_size: int | None = None,
    ) -> ImageRequest:
        """Repeat a condition of `num_prompts` rows for all images to generate, and resolve their seeds."""
        per_prompt, num_candidates = validate_num_images(num_images_per_prompt, num_prompts), int(num_candidates)
        images = num_prompts * per_prompt
        if images * num_candidates > MAX_IMAGES:
            raise ValueError(
                f"num_candidates is too large: one call generates at most {MAX_IMAGES} images, got {images} x "
                f"{num_candidates} candidates"
            )
        seeds = resolve_seeds(generator, images)
        if num_candidates > 1:
            seeds = seeds.for_candidates(num_candidates)
        condition = condition.repeat(per_prompt * num_candidates)
        at_once = None if batch_size is None else int(batch_size)
        return cls(method, condition, guidance, sampling, seeds, num_candidates, at_once)

    def select_rows(self, rows: slice) -> ImageRequest:
        """Return the request for some of the images to generate."""
        return replace(
            self,
            condition=self.condition.select_rows(rows),
            seeds=self.seeds.select_rows(rows),
            fixed=self.fixed and self.fixed.select_rows(rows),
        )


def generate_tokens(pipe: VisualPipeline, request: ImageRequest, on_step_end: OnStepEnd | None) -> DecodeOutput:
    """Generate the tokens of all images of a request, candidates included, in batches."""
    count = len(request.seeds.seeds)
    at_once = count if request.batch_size is None else min(request.batch_size, count)
    is_list = at_once < count and pipe.joins_running_batch(request.method)
    with pipe._calls.start() as call, pipe.progress_bar(total=pipe.num_tokens) as bar:

        def callback(progress: Progress) -> bool | None:
            # Where images begin one after another, the number of tokens is their mean, otherwise the smallest.
            num_tokens = int(progress.length.float().mean() if is_list else progress.length.amin())
            bar.update(num_tokens - bar.n)
            if on_step_end is None:
                return not call.interrupted
            answer = on_step_end(pipe, progress.step - 1, num_tokens, {"latents": progress.tokens.clone()})
            return not (wants_stop(answer) or call.interrupted)

        parts: list[DecodeOutput] = []
        for first in range(0, count, count if is_list else at_once):
            rows = slice(first, count if is_list else first + at_once)
            parts.append(pipe._decode(request if at_once == count else request.select_rows(rows), callback))
            if parts[-1].stats.stopped:
                break
    result = parts[0] if len(parts) == 1 and len(parts[0].tokens) == count else _join_outputs(parts, count)
    result.stats.seeds = request.seeds.seeds
    return result


def _join_outputs(parts: list[DecodeOutput], images: int) -> DecodeOutput:
    """Join the outputs of consecutive rows; rows that are missing because a callback stopped the call are empty."""
    tokens, length = torch.cat([part.tokens for part in parts]), torch.cat([part.length for part in parts])
    tokens, length = (torch.cat([x, x.new_zeros(images - len(x), *x.shape[1:])]) for x in (tokens, length))
    return DecodeOutput(tokens, length, DecodeStats.merge([part.stats for part in parts]))


def select_candidates(
    pipe: VisualPipeline, result: DecodeOutput, request: ImageRequest, scorer: Scorer, prompts: Sequence[str]
) -> DecodeOutput:
    """Return the rows of the best candidates, one per image; their statistics have all scores and seeds.

    Args:
        result: tokens of all candidates, grouped by image.
        scorer: scores the candidates' pixels, float `[N, 3, Y, X]` in [0, 1].
        prompts: one per image, not repeated for its candidates.
    """
    count, stats = request.num_candidates, result.stats
    pixels = pipe.decode_tokens(result.tokens, result.length if stats.stopped else None, "pt")
    repeated = [prompt for prompt in prompts for _ in range(count)]
    scores = score_images(scorer, pixels.float().cpu(), repeated).view(-1, count)
    best = scores.argmax(1) if scorer.higher_is_better else scores.argmin(1)
    selected = torch.arange(len(best)) * count + best
    stats.scorer, stats.scores = scorer.name, scores.tolist()
    seeds, rows = request.seeds.seeds, selected.to(result.tokens.device)
    stats.candidate_seeds = [seeds[i : i + count] for i in range(0, len(seeds), count)]
    stats.seeds = [seeds[i] for i in selected.tolist()]
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

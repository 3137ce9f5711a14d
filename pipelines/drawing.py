"""The course of a call that every family shares: check, encode, draw, choose the best, make pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vargen.decoding import DecodeOutput, Progress, Sampling
from vargen.device import check_compile
from vargen.models.condition import Condition
from vargen.pipelines import checks
from vargen.pipelines.best_of import CandidateSelection
from vargen.pipelines.calls import Call
from vargen.pipelines.checks import ImageSeeds
from vargen.pipelines.conditioning import repeat_condition
from vargen.pipelines.memory import within_memory

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline

OnStepEnd = Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None]


class PromptInputs(NamedTuple):
    """What a call says of its condition, or of the one that guidance leads away from; see a pipeline's `__call__`."""

    prompt: Any = None
    embeds: Any = None
    mask: Any = None
    class_labels: Any = None


@dataclass(frozen=True)
class GenerationRequest:
    """A call whose arguments are checked and whose prompts are encoded.

    Attributes:
        prompts: how many prompts or classes. drawn: pictures to draw, candidates included; the condition has a row for each.
        negative: a row for each likewise, or None.
        texts: what a scorer reads, for each picture; empty without one.
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
    """Raise ValueError or TypeError for what a call cannot use, before anything is encoded."""
    if pipe.transformer is None or pipe.vqvae is None:
        raise ValueError("this pipeline was loaded without a transformer or vqvae: it only encodes prompts")
    checks.check_output_type(output_type)
    check_compile(compile, pipe._device_of(pipe.transformer))
    checks.check_callback(on_step_end, tensor_inputs, pipe._callback_tensor_inputs)
    if negative_prompt is not None:
        checks.check_prompts(negative_prompt, "negative_prompt")


def resolve_sampling(pipe: VisualPipeline, given: dict[str, Any]) -> tuple[float, Sampling]:
    """Guidance scale and sampling of a call; None stands for the checkpoint's default.

    Raises:
        ValueError, TypeError: for values out of range, naming the argument.
    """
    scale, sampling = checks.check_sampling({**pipe.default_sampling, **{k: v for k, v in given.items() if v is not None}})
    sampling.check_vocabulary(pipe.vocab)
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
    """Encode what a call asks for.

    Args:
        unwanted: what guidance leads away from. per_prompt: pictures of each prompt. generator, clean: of the call.

    Raises:
        ValueError, TypeError: for conditions, generators or numbers of pictures that do not fit, before any drawing.
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
    """Draw what is asked for, and make pictures of it.

    Args:
        run: draws a part of the request's rows, with a callback. on_step_end: of the call.

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
    """Feeds the progress bar, and the caller's callback with diffusers' arguments."""

    def callback(progress: Progress) -> bool | None:
        # Reading a length waits for the device: on CUDA only now and then.
        if progress.tokens.device.type == "cpu" or progress.step % 16 == 0 or on_step_end is not None:
            drawn = int(progress.length.amin())
            bar.update(drawn - bar.n)
        if on_step_end is None:
            return not call.interrupt
        left_out = progress.tokens < 0  # whole scales, by some schedules
        answer = on_step_end(pipe, progress.step - 1, drawn, {"latents": progress.tokens})
        answer = checks.check_answer(answer, progress.tokens, pipe.vocab, left_out)
        latents = answer.get("latents")
        if latents is not None and latents is not progress.tokens:
            progress.tokens.copy_(latents)
        return not (answer.get("stop", False) or call.interrupt)

    return callback

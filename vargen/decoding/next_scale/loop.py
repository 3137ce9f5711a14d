"""The next-scale loop: select the stage; one pass; sample the scale; commit; repeat.

Keys and values of a scale depend only on its input, the sum of the scales before it, and not on its own tokens.

Shape suffixes: B images, S scales, L tokens of all scales, n tokens of one scale, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.harness import Callback, DecodeOutput, Run, validate_call
from vargen.decoding.next_scale.protocols import ScaleModel
from vargen.decoding.next_scale.schedule import ScaleSchedule, Stage
from vargen.decoding.next_scale.state import FixedTokens, ImageState
from vargen.decoding.presets import resolve_method
from vargen.decoding.sampling import Sampling
from vargen.values import short_repr


@torch.no_grad()
@without_autocast
def decode_scales(
    model: ScaleModel,
    condition: Any,
    seeds: Tensor,
    schedule: str | ScaleSchedule = "plain",
    sampling: Sampling | None = None,
    *,
    fixed_scales: Sequence[Tensor] = (),
    fixed_tokens: FixedTokens | None = None,
    callback: Callback | None = None,
    profile: bool = False,
) -> DecodeOutput:
    """Generate the tokens of B images.

    Args:
        model: see `ScaleModel`.
        condition: passed to `model.start`; B rows.
        seeds: int64 `[B]`. Image i depends only on `seeds[i]` and its condition, not on the rest of the batch.
        schedule: the name of a preset, or a `ScaleSchedule`.
        sampling: temperature and filters. Default: sample from the unfiltered softmax.
        fixed_scales: tokens int64 `[B, n]` of the first scales, which are not sampled; for variations of an image.
        fixed_tokens: function that returns fixed tokens at some positions of a scale; for inpainting.
        callback: called after every pass with a `Progress`. Returning False stops the run. It may modify the tokens of the last
            generated scale in place.
        profile: on CUDA, synchronize between the parts of a step to measure their seconds.

    Returns:
        Tokens `[B, L]`, coarse to fine, lengths `[B]`, statistics with `by_scale`, and the canvas, the sum of all generated
            scales.

    Raises:
        ValueError: if the schedule is unknown or cannot run on this model, `top_k` exceeds the vocabulary, or fixed tokens
            are not tokens of the model.
        TypeError: if the schedule, seeds, sampling or callback has the wrong type.
        NonFiniteLogitsError: if logits are not finite; names the pass and position of the first.
    """
    method: ScaleSchedule = resolve_method(schedule, ScaleSchedule.paradigm)
    sampling = Sampling() if sampling is None else sampling
    if isinstance(model, type) or not isinstance(model, ScaleModel):
        raise TypeError(f"model must be a ScaleModel, got {short_repr(model)}")
    validate_call(seeds, sampling, callback)
    _validate_fixed_scales(fixed_scales, model, len(seeds))
    sampling.validate_top_k(model.vocab)
    stages = method.bind(model)
    run = Run(model.device, sum(model.scale_tokens), callback, profile)
    images = ImageState(seeds.to(model.device), model, stages, sampling, fixed_scales, fixed_tokens)
    stats = images.stats(method.name, run_scales(run, images, model, condition))
    run.finish(stats)
    return DecodeOutput(images.tokens, images.length, stats, finished=not run.stopped, canvas=images.canvas)


def run_scales(run: Run, images: ImageState, model: ScaleModel, condition: Any) -> dict[str, Counter[int]]:
    """Run the algorithm. Every pass completes one scale of every image.

    Returns the number of passes of each model by the number of tokens they fed.
    """
    models = _ModelStates(model, condition, images.stages)
    while images.scale < len(images.stages) and not run.stopped:
        stage = images.stages[images.scale]
        with run.time_part("target"):
            logits = models.run(stage.model, images.inputs, stage.guidance)
        with run.time_part("accept"):
            before = images.length
            images.sample_scale(logits)
        with run.time_part("commit"):
            run.end_pass(*images.summarize_pass(logits), images.length, images.length - before)
            images.commit_scale()
            models.drop_unused(images.scale)
    return models.tokens_fed


class _ModelStates:
    """The models, their states, and the number of scales in each cache."""

    def __init__(self, model: ScaleModel, condition: Any, stages: Sequence[Stage]):
        self.models = {"target": model, "draft": model.draft_model}
        self.condition, self.stages = condition, stages
        self.states: dict[str, Any] = {}
        self.num_cached: dict[str, int] = {}
        self.tokens_fed: dict[str, Counter[int]] = {"target": Counter(), "draft": Counter()}

    def run(self, name: str, inputs: Sequence[Tensor | None], guidance: float) -> Tensor:
        """Run one pass of a model over those of `inputs` that are not in its cache; return the logits of the last scale."""
        model = self.models[name]
        assert model is not None
        if name not in self.states:
            self.states[name], self.num_cached[name] = model.start(self.condition), 0
        new = range(self.num_cached[name], len(inputs))
        self.tokens_fed[name][sum(model.scale_tokens[k] for k in new)] += 1
        logits = model.forward(self.states[name], inputs, guidance)
        self.num_cached[name] = len(inputs)
        return logits

    def drop_unused(self, scale: int) -> None:
        """Drop the states of models that generate no scale from `scale` on."""
        needed = {stage.model for stage in self.stages[scale:]}
        for name in [name for name in self.states if name not in needed]:
            del self.states[name], self.num_cached[name]


def _validate_fixed_scales(fixed_scales: Sequence[Tensor], model: ScaleModel, images: int) -> None:
    if len(fixed_scales) > len(model.scale_tokens):
        raise ValueError(
            f"fixed_scales must hold at most the model's {len(model.scale_tokens)} scales, got {len(fixed_scales)}"
        )
    for scale, tokens in enumerate(fixed_scales):
        shape, codes = [images, model.scale_tokens[scale]], model.scale_codes[scale]
        if list(tokens.shape) != shape or tokens.dtype != torch.int64:
            raise ValueError(f"fixed_scales[{scale}] must be int64 {shape}, got {tokens.dtype} {list(tokens.shape)}")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < codes:
            raise ValueError(f"fixed_scales[{scale}] must hold tokens from 0 to {codes - 1}")

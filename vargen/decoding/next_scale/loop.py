"""The next-scale loop: select the stage; draft scales if it does; one pass; sample or verify the scales it fed; commit; repeat.

The tokens of a scale depend only on the scales before it. Rejecting a draft therefore discards only later scales, and the
rejected scale itself is completed in the same pass. Keys and values of a scale depend only on its input, the sum of the scales
before it; they stay valid when its own tokens are resampled.

The batch advances with its slowest image. Images ahead of it are fed the same tokens again without effect, because every sample
is a function of the image's seed and the token's position.

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
from vargen.decoding.next_scale.state import Images, Keep
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
    given: Sequence[Tensor] = (),
    keep: Keep | None = None,
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
        given: fixed tokens int64 `[B, n]` of the first scales, which are not sampled; for variations of an image.
        keep: fixed tokens at some positions of a scale; for inpainting.
        callback: called after every pass with a `Progress`. Returning False stops the run. It may modify the tokens of the last
            generated scale in place.
        profile: on CUDA, synchronize between the parts of a step to measure their seconds.

    Returns:
        Tokens `[B, L]`, coarse to fine (`SKIPPED_TOKEN` for skipped scales), lengths `[B]`, statistics with `by_scale`, and the
            canvas, the sum of all generated scales.

    Raises:
        ValueError: if the schedule is unknown or cannot run on this model, `top_k` exceeds the vocabulary, or given tokens are
            not tokens of the model.
        TypeError: if the schedule, seeds, sampling or callback has the wrong type.
        NonFiniteLogitsError: if logits are not finite; names the pass and position of the first.
    """
    method: ScaleSchedule = resolve_method(schedule, ScaleSchedule.paradigm)
    sampling = Sampling() if sampling is None else sampling
    if isinstance(model, type) or not isinstance(model, ScaleModel):
        raise TypeError(f"model must be a ScaleModel, got {short_repr(model)}")
    validate_call(seeds, sampling, callback)
    _check_given(given, model, len(seeds))
    sampling.check_vocabulary(model.vocab)
    stages = method.bind(model)
    run = Run(model.device, sum(model.scale_tokens), callback, profile)
    images, players = _loop(run, model, condition, seeds.to(model.device), stages, sampling, given, keep)
    stats = images.stats(method.name, players.fed)
    run.close(stats)
    return DecodeOutput(images.tokens, images.length, stats, finished=not run.stopped, canvas=images.canvases[-1])


def _loop(
    run: Run,
    model: ScaleModel,
    condition: Any,
    seeds: Tensor,
    stages: Sequence[Stage],
    sampling: Sampling,
    given: Sequence[Tensor],
    keep: Keep | None,
) -> tuple[Images, _Players]:
    """Run the algorithm. Every pass completes at least one scale of every image."""
    images = Images(seeds, model, stages, sampling, keep)
    players = _Players(model, condition, stages)
    images.begin(given)
    while images.scale < len(stages) and not run.stopped:
        stage = stages[images.scale]
        if stage.model == "none":
            images.leave_out()
            continue
        with run.part("draft"):
            drafts = images.drafted(players, stage)
        with run.part("target"):
            logits = players.logits(stage.model, [*images.inputs, *drafts.inputs], 1 + len(drafts.inputs), images.guidance())
        with run.part("accept"):
            before = images.length
            scales = images.judged(logits, drafts)
        with run.part("commit"):
            run.record(*images.report(logits), images.length, images.length - before)
            images.advance(scales)
            players.rollback(images.scale)
    return images, players


class _Players:
    """The models, their states, and the number of scales in each cache."""

    def __init__(self, model: ScaleModel, condition: Any, stages: Sequence[Stage]):
        self.models = {"target": model, "draft": model.draft_model}
        self.condition, self.stages = condition, stages
        self.states: dict[str, Any] = {}
        self.held: dict[str, int] = {}
        self.fed: dict[str, Counter[int]] = {"target": Counter(), "draft": Counter()}

    def logits(self, name: str, inputs: Sequence[Tensor | None], count: int, guidance: Sequence[float]) -> list[Tensor]:
        """Run one pass of a model over those of `inputs` that are not in its cache.

        Returns the logits of the last `count` scales.
        """
        model = self.models[name]
        assert model is not None
        if name not in self.states:
            self.states[name], self.held[name] = model.start(self.condition), 0
        new = range(self.held[name], len(inputs))
        self.fed[name][sum(model.scale_tokens[k] for k in new)] += 1
        logits = model.forward(self.states[name], inputs, count, guidance[:count])
        self.held[name] = len(inputs)
        return logits

    def rollback(self, scale: int) -> None:
        """Discard cached scales from `scale` on, whose inputs were rejected drafts.

        The states of models that no later scale uses are dropped.
        """
        needed = {stage.model for stage in self.stages[scale:]} | {"draft" for stage in self.stages[scale:] if stage.drafted}
        for name in [name for name in self.states if name not in needed]:
            del self.states[name], self.held[name]
        for name, held in self.held.items():
            model = self.models[name]
            if held > scale and model is not None:
                model.rollback(self.states[name], scale)
                self.held[name] = scale


def _check_given(given: Sequence[Tensor], model: ScaleModel, images: int) -> None:
    if len(given) > len(model.scale_tokens):
        raise ValueError(f"given must hold at most the model's {len(model.scale_tokens)} scales, got {len(given)}")
    for scale, tokens in enumerate(given):
        wanted, codes = [images, model.scale_tokens[scale]], model.scale_codes[scale]
        if list(tokens.shape) != wanted or tokens.dtype != torch.int64:
            raise ValueError(f"given[{scale}] must be int64 {wanted}, got {tokens.dtype} {list(tokens.shape)}")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < codes:
            raise ValueError(f"given[{scale}] must hold tokens from 0 to {codes - 1}")

"""The next-scale loop: pick the stage; perhaps draft some scales; one pass; draw or judge the scales it fed; commit; repeat.

The tokens of a scale depend on the scales before it alone. So rejecting a draft discards later scales only, and the
scale at which it is rejected is finished in the same pass. Keys and values of a scale
depend on what it was fed, the sum of the scales before: they stay valid when its own tokens are redrawn.

The batch advances with its slowest image. Those ahead of it are fed the same tokens again, to no effect: every draw is a
function of the image's seed and the token's place.

Shape suffixes: B images, S scales, L tokens of all scales, n tokens of one, V vocabulary.
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
    """Draw the tokens of B images.

    Args:
        model: see `ScaleModel`.
        condition: passed to `model.start`; B rows.
        seeds: int64 `[B]`; image i depends on `seeds[i]` and its condition alone, not on the batch around it.
        schedule: a preset's name or a `ScaleSchedule`.
        sampling: temperature and filters; default: the plain softmax.
        given: tokens int64 `[B, n]` of the first scales, which stand and are not drawn: for variations of a picture.
        keep: tokens that stand at some places of a scale: for drawing a part of a picture anew.
        callback: called after every pass with a `Progress`; returning False stops the run. It may change, in place, the tokens
            of the scale that was drawn last.
        profile: on CUDA, wait for the device between parts so that seconds are known by part.

    Returns:
        Tokens `[B, L]`, coarse to fine (`SKIPPED_TOKEN` where a scale was left out), lengths `[B]`, statistics with
        `by_scale`, and the canvas, the sum of all scales that were drawn.

    Raises:
        ValueError: for an unknown schedule, one that this model cannot run, a `top_k` over the vocabulary, or tokens given that
            are none of the model's.
        TypeError: for a schedule, seeds, a sampling or a callback of another type.
        NonFiniteLogitsError: with the pass and position of the first non-finite logits.
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
    """The algorithm. Every pass finishes at least one scale of every image."""
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
    """The models, their states, and how many scales each holds."""

    def __init__(self, model: ScaleModel, condition: Any, stages: Sequence[Stage]):
        self.models = {"target": model, "draft": model.draft_model}
        self.condition, self.stages = condition, stages
        self.states: dict[str, Any] = {}
        self.held: dict[str, int] = {}
        self.fed: dict[str, Counter[int]] = {"target": Counter(), "draft": Counter()}

    def logits(self, name: str, inputs: Sequence[Tensor | None], count: int, guidance: Sequence[float]) -> list[Tensor]:
        """One pass of a model over what it does not hold of `inputs`: the logits of the last `count` scales."""
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
        """Forget what the models hold of scales from `scale` on, which were fed drafts that are void, and models that no later
        scale needs."""
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

"""Next-scale decoding: all tokens of a scale are sampled in one pass, and added to the canvas.

Keys and values of a scale depend only on its input, the sum of the scales before it, and not on its own tokens. Tokens and
canvas are allocated once for B images, and inputs with the first ones; a pass changes nothing but their contents.

Shape suffixes: B slots, S scales, L tokens of all scales, n tokens of one scale, E width of a code, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.clock import Clock
from vargen.decoding.interfaces import ScaleModel
from vargen.decoding.methods import resolve_method
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.requests import (
    Callback,
    DecodeOutput,
    NonFiniteLogitsError,
    Progress,
    describe_non_finite_logits,
    select_rows,
    validate_call,
)
from vargen.decoding.sampling import Sampling, SlotSampling
from vargen.decoding.schedule import ScaleSchedule, Stage
from vargen.decoding.stats import DecodeStats
from vargen.decoding.token_pass import are_finite, sum_rows
from vargen.kernels.dispatch import is_eager_cpu
from vargen.values import short_repr

# Fixed tokens of a scale, given the canvas before it and its index: tokens int64 [B, n], and which are fixed, bool [B, n].
FixedTokens = Callable[[Tensor, int], tuple[Tensor, Tensor]]


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
        condition: passed to `model.allocate` and `model.reset`; B rows.
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
    stages, clock = method.bind(model), Clock(model.device, profile)
    scales = ScalePasses(model, stages, condition, len(seeds), clock)
    scales.start(condition, seeds.to(model.device), sampling)
    for tokens in fixed_scales:
        scales.put(tokens)
    is_stopped = False
    while scales.scale < len(stages) and not is_stopped:
        with clock.measure("target"):
            logits = scales.forward()
        with clock.measure("accept"):
            scales.sample(logits, fixed_tokens)
        if is_eager_cpu(logits):
            scales.check_finite()
        if callback is not None:
            is_stopped = callback(scales.make_progress()) is False and scales.scale + 1 < len(stages)
        with clock.measure("commit"):
            scales.add()
    scales.check_finite()
    stats = scales.make_stats(method.name, len(seeds))
    stats.stopped, stats.seconds, stats.seconds_by_part = is_stopped, clock.read() - clock.started, dict(clock.parts)
    length = torch.full((len(seeds),), scales.ends[scales.scale], device=model.device)
    return DecodeOutput(scales.tokens.clone(), length, stats, finished=not is_stopped, canvas=scales.canvas.clone())


class ScalePasses:
    """The passes of a schedule over B slots, one for each scale: forward, sample, add.

    Args:
        model: see `ScaleModel`.
        stages: the stage of each scale; see `ScaleSchedule.bind`.
        condition: the state has room for conditions as long as this one.
        slots: number of images B.
        clock: measures the parts of a pass.

    Attributes:
        make_noise: the source of all random numbers. Another one enumerates them; see `vargen.evaluation.enumeration`.
        seeds: int64 `[B]`.
        tokens: int64 `[B, L]`.
        canvas: the canvas after the scales before `scale`.
        inputs: of each scale up to `scale`, float `[B, n, E]`; None for scale 0.
        nonfinite: int64 `[B]`, the first position whose logits were not finite; L if there is none.
        scale: the next scale.
        ends: number of tokens before each scale, and of all.
    """

    def __init__(self, model: ScaleModel, stages: Sequence[Stage], condition: Any, slots: int, clock: Clock):
        self.model, self.stages, self.clock = model, stages, clock
        self.make_noise: Callable[[Tensor, Tensor], Noise] = Noise
        self.ends = [0, *accumulate(model.scale_tokens)]
        L, device = self.ends[-1], torch.device(model.device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(slots, L, dtype=torch.int64, device=device)
        self.nonfinite = torch.full((slots,), L, dtype=torch.int64, device=device)
        self.position = torch.arange(L, device=device).expand(slots, -1)
        self.sampling = SlotSampling(slots, model.vocab, device)
        self.canvas = model.canvas(slots)
        self.inputs: list[Tensor | None] = [None] * len(stages)
        self.models: dict[str, ScaleModel | None] = {"target": model, "draft": model.draft_model}
        guided = {stage.model: any(each.model == stage.model and each.guidance > 0 for each in stages) for stage in stages}
        self.states = {name: self._model(name).allocate(condition, slots, is_guided) for name, is_guided in guided.items()}
        self.scale = self.passes = 0
        self._by_scale: list[dict[str, Any]] = []

    def _model(self, name: str) -> ScaleModel:
        found = self.models[name]
        assert found is not None
        return found

    def start(self, condition: Any, seeds: Tensor, sampling: Sampling) -> None:
        """Start n images, at most B; the slots after them repeat the first one."""
        spare = len(self.seeds) - len(seeds)
        rows = torch.cat([torch.arange(len(seeds)), torch.zeros(spare, dtype=torch.int64)])
        condition = condition if not spare else select_rows(condition, rows.tolist())
        self.seeds.copy_(seeds[rows.to(seeds.device)])
        self.sampling.reset(list(range(len(rows))), sampling)
        self.canvas.copy_(self.model.canvas(len(rows)))
        self.tokens.zero_()
        self.nonfinite.fill_(self.ends[-1])
        for name, state in self.states.items():
            self._model(name).reset(state, condition)
        self.scale, self.passes = 0, 0
        self._cached = dict.fromkeys(self.states, 0)
        self._fed: dict[str, Counter[int]] = {"target": Counter(), "draft": Counter()}
        self._by_scale = [
            {"tokens": n, "model": stage.model, "passes": 0, "seconds": 0.0}
            for n, stage in zip(self.model.scale_tokens, self.stages, strict=True)
        ]
        self._last_time = time.perf_counter()

    @property
    def place(self) -> slice:
        """The tokens of the next scale in `tokens`."""
        return slice(self.ends[self.scale], self.ends[self.scale + 1])

    def put(self, tokens: Tensor) -> None:
        """Fix the tokens int64 `[M, n]` of M images at the next scale, which is not sampled."""
        self.tokens[:, self.place] = tokens[:1].to(self.tokens)  # also in slots that repeat the first image
        self.tokens[: len(tokens), self.place] = tokens.to(self.tokens)
        self._by_scale[self.scale]["model"] = "given"
        self.add()

    def forward(self) -> Tensor:
        """Run a pass over the scales that are not in the cache yet; logits `[B, n, codes]` of the next scale."""
        stage = self.stages[self.scale]
        name, first = stage.model, self._cached[stage.model]
        self._fed[name][self.ends[self.scale + 1] - self.ends[first]] += 1
        self._cached[name], self.passes = self.scale + 1, self.passes + 1
        return self._model(name).forward(self.states[name], self.inputs[: self.scale + 1], stage.guidance)

    def sample(self, logits: Tensor, fixed_tokens: FixedTokens | None = None) -> None:
        """Sample the tokens of the next scale with the shared noise, except for those that are fixed."""
        position, record = self.position[:, self.place], self._by_scale[self.scale]
        now = time.perf_counter()
        record["passes"] += 1
        record["seconds"] += now - self._last_time
        self._last_time = now
        noise = self.make_noise(self.seeds, position)
        found = None if fixed_tokens is not None else self.sampling.sample_tokens(logits, noise)
        if found is not None:
            tokens = found.tokens
        else:
            probs = self.sampling.probs(logits)
            if fixed_tokens is not None:
                given, is_fixed = fixed_tokens(self.canvas, self.scale)
                one_hot = torch.zeros_like(probs).scatter_(2, given[..., None], 1.0)
                probs = torch.where(is_fixed[..., None], one_hot, probs)
            tokens = noise.sample(probs, Purpose.TOKEN)
        self.tokens[:, self.place] = tokens
        sums = sum_rows(logits) if found is None else found.sums
        if not are_finite(sums):
            bad = torch.where(sums.isfinite(), self.ends[-1], position).amin(1)
            self.nonfinite.copy_(torch.minimum(self.nonfinite, bad))

    def add(self) -> None:
        """Add the tokens of the next scale to the canvas, and make the input of the scale after it."""
        canvas, following = self.model.add(self.canvas, self.tokens[:, self.place], self.scale)
        self.canvas.copy_(canvas)
        self.scale += 1
        if following is None:
            return
        if (held := self.inputs[self.scale]) is None:
            self.inputs[self.scale] = following.clone()
        else:
            held.copy_(following)

    def check_finite(self) -> None:
        """Raise NonFiniteLogitsError if a pass so far returned logits that are not finite. On a GPU it waits for the passes."""
        position, total = int(self.nonfinite.min()), self.ends[-1]
        if position < total:
            scale = next(scale for scale, end in enumerate(self.ends[1:]) if position < end)
            number = sum(record["passes"] for record in self._by_scale[: scale + 1])
            raise NonFiniteLogitsError(describe_non_finite_logits(position, total, number))

    def make_progress(self) -> Progress:
        """Return the progress after a pass, before the scale is added to the canvas: its tokens may be changed."""
        length = torch.full((len(self.seeds),), self.place.stop, dtype=torch.int64, device=self.seeds.device)
        count = torch.full_like(length, self.place.stop - self.place.start)
        return Progress(self.passes, length, self.ends[-1], count, lambda: self.tokens)

    def make_stats(self, name: str, images: int) -> DecodeStats:
        """Return the statistics of the first `images` slots, without seconds."""
        committed = Counter({record["tokens"]: 0 for record in self._by_scale})
        for record in self._by_scale:
            committed[record["tokens"]] += images * record["passes"]
        return DecodeStats(
            accelerator=name,
            images=images,
            tokens=images * self.ends[self.scale],
            passes=self.passes,
            committed_histogram=[committed[count] for count in range(max(committed) + 1)] if self.passes else [0],
            passes_by_width=dict(self._fed["target"]),
            draft_passes_by_width=dict(self._fed["draft"]),
            relaxation=[0.0] * images,
            seeds=self.seeds[:images].tolist(),
            threads=torch.get_num_threads(),
            by_scale=self._by_scale,
        )


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

"""Next-scale decoding: all tokens of a scale are sampled in one pass, and added to the canvas.

A schedule is data: which model generates which scales, and how guided.

Keys and values of a scale depend only on its input, the sum of the scales before it, and not on its own tokens. Tokens and
canvas are allocated once for B images, and inputs with the first ones; a pass changes nothing but their contents.

Shape suffixes: B slots, S scales, L tokens of all scales, n tokens of one scale, E width of a code, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vargen import capture
from vargen.compat import without_autocast
from vargen.decoding.interfaces import ScaleModel
from vargen.decoding.methods import Method, register_presets, resolve_method
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.requests import Callback, DecodeOutput, NonFiniteLogitsError, Progress, select_rows, validate_call
from vargen.decoding.sampling import Sampling, SlotSampling
from vargen.decoding.stats import DecodeStats
from vargen.kernels import ops
from vargen.kernels.graph import capture_passes
from vargen.kernels.host import Clock
from vargen.values import number_field, parse_int, short_repr, validate_fields

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
    passes: ScalePasses | None = None,
) -> DecodeOutput:
    """Generate the tokens of B images.

    Args:
        model: see `ScaleModel`.
        condition: passed to `model.allocate` and `model.reset`; B rows.
        seeds, sampling: as for `decode`; int64 `[B]`.
        schedule: the name of a preset, or a `ScaleSchedule`.
        fixed_scales: tokens int64 `[B, n]` of the first scales, which are not sampled; for variations of an image.
        fixed_tokens: function that returns fixed tokens at some positions of a scale; for inpainting.
        callback: called after every pass with a `Progress`, whose newest tokens it may change. Returning False stops the run.
        profile: see `Engine`.
        passes: those of an earlier call with at least as many slots, to use their buffers and graphs again.

    Returns:
        Tokens `[B, L]`, coarse to fine, lengths `[B]`, statistics with `by_scale`, and the canvas of all generated scales.

    Raises:
        ValueError: if the schedule is unknown, or the schedule, `top_k` or fixed scales do not fit the model.
        TypeError, NonFiniteLogitsError: as for `decode`.
    """
    method: ScaleSchedule = resolve_method(schedule, ScaleSchedule.paradigm)
    sampling = Sampling() if sampling is None else sampling
    validate_call(seeds, sampling, callback)
    sampling.validate_top_k(model.vocab)
    scales = passes or ScalePasses(model, method.bind(model), condition, len(seeds), Clock(model.device, profile))
    scales.start(condition, seeds.to(model.device), sampling)
    for tokens in fixed_scales:
        scales.put(tokens)
    is_stopped, M = False, len(seeds)
    while scales.scale < len(scales.stages) and not is_stopped:
        scales.run(fixed_tokens)
        is_stopped = callback is not None and callback(scales.make_progress()) is False
        scales.add()
    scales.check_finite()
    stats = scales.make_stats(method.name, M)
    length = torch.full((M,), scales.ends[scales.scale], device=model.device)
    return DecodeOutput(scales.tokens[:M].clone(), length, stats, canvas=scales.canvas[:M].clone())


class ScalePasses:
    """The passes of a schedule over B slots, one for each scale: forward, sample, add.

    On a GPU they are captured as graphs, but for the first pass of a model, which also embeds the condition.

    Args:
        model: see `ScaleModel`.
        stages: the stage of each scale; see `ScaleSchedule.bind`.
        condition: the state has room for conditions as long as this one.
        slots: number of images B.
        clock: measures the parts of a pass.

    Attributes:
        make_noise: the source of all random numbers. Another one enumerates them; see `vargen.verify.enumeration`.
        seeds, tokens: int64 `[B]` and `[B, L]`.
        canvas: the canvas after the scales before `scale`.
        inputs: of each scale up to `scale`, float `[B, n, E]`; None for scale 0.
        nonfinite: int64 `[B]`, the first position whose logits were not finite; L if there is none.
        scale: the next scale.
        ends: number of tokens before each scale, and of all.
        captured: runs passes as graphs; None if they run one by one.
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
        self.models: dict[str, Any] = {"target": model, "draft": model.draft_model}
        guided = {stage.model: any(each.model == stage.model and each.guidance > 0 for each in stages) for stage in stages}
        self.states = {name: self.models[name].allocate(condition, slots, each) for name, each in guided.items()}
        networks = [network for name in self.states for network in self.models[name].networks]
        self.captured = capture_passes(capture.make_graphs(device), networks, clock.synchronizes)

    def start(self, condition: Any, seeds: Tensor, sampling: Sampling) -> None:
        """Start n images, at most B; the slots after them repeat the first one."""
        slots = len(self.seeds)
        self.clock.restart()
        if self.captured is not None:
            self.captured.check_networks()
        rows = [*range(len(seeds)), *[0] * (slots - len(seeds))]
        condition = condition if len(seeds) == slots else select_rows(condition, rows)
        self.seeds.copy_(seeds[rows])
        self.sampling.set(list(range(slots)), sampling)
        self.canvas.copy_(self.model.canvas(slots))
        self.tokens.zero_()
        self.nonfinite.fill_(self.ends[-1])
        for name, state in self.states.items():
            self.models[name].reset(state, condition)
        self.scale = self.passes = 0
        self._cached = dict.fromkeys(self.states, 0)
        self._fed: dict[str, Counter[int]] = {"target": Counter(), "draft": Counter()}
        self._by_scale: list[dict[str, Any]] = [
            {"tokens": n, "model": stage.model, "passes": 0, "seconds": 0.0}
            for n, stage in zip(self.model.scale_tokens, self.stages, strict=True)
        ]
        self._last_time = self.clock.timer()

    @property
    def place(self) -> slice:
        """The tokens of the next scale in `tokens`."""
        return slice(self.ends[self.scale], self.ends[self.scale + 1])

    def put(self, tokens: Tensor) -> None:
        """Fix the tokens int64 `[B, n]` of the next scale, which is not sampled; ValueError if they do not fit it."""
        if self.scale == len(self.stages):
            raise ValueError(f"fixed_scales must hold at most the model's {self.scale} scales")
        shape = [len(self.seeds), self.model.scale_tokens[self.scale]]
        codes = self.model.scale_codes[self.scale]
        if list(tokens.shape) != shape or not 0 <= int(tokens.min()) <= int(tokens.max()) < codes:
            expected = f"int64 {shape} from 0 to {codes - 1}"
            raise ValueError(f"fixed_scales[{self.scale}] must be {expected}, got {tokens.dtype} {list(tokens.shape)}")
        self.tokens[:, self.place] = tokens.to(self.tokens)
        self._by_scale[self.scale]["model"] = "given"
        self.add()

    def run(self, fixed_tokens: FixedTokens | None = None) -> None:
        """Run the pass of the next scale, and sample its tokens with the shared noise, except for those that are fixed."""
        name = self.stages[self.scale].model
        first, self._cached[name] = self._cached[name], self.scale + 1
        self._fed[name][self.place.stop - self.ends[first]] += 1
        if self.captured is None or fixed_tokens is not None or first == 0:  # it also embeds the condition, another tensor
            with self.clock.measure("target"):
                logits = self._forward(first)
            with self.clock.measure("accept"):
                self._sample(logits, fixed_tokens)
        else:
            kind = self.scale, first, *self.sampling.kind
            self.captured.run(kind, lambda: self._sample(self._forward(first), None))
        record, now = self._by_scale[self.scale], self.clock.timer()
        record["passes"], record["seconds"] = 1, now - self._last_time
        self._last_time, self.passes = now, self.passes + 1
        if self.captured is None and ops.host_values(self.nonfinite) is not None:
            self.check_finite()

    def _forward(self, first: int) -> Tensor:
        """Run a pass over the scales from `first` on, the first not in the cache; logits `[B, n, codes]` of the next scale."""
        stage = self.stages[self.scale]
        model, state = self.models[stage.model], self.states[stage.model]
        if self.captured is not None:
            model.set_cached(state, first)
        return model.forward(state, self.inputs[: self.scale + 1], stage.guidance)

    def _sample(self, logits: Tensor, fixed_tokens: FixedTokens | None) -> None:
        position = self.position[:, self.place]
        noise = self.make_noise(self.seeds, position)
        found = self.sampling.sample_tokens(logits, noise)
        tokens = noise.sample(self.sampling.probs(logits), Purpose.TOKEN) if found is None else found.tokens
        if fixed_tokens is not None:
            given, is_fixed = fixed_tokens(self.canvas, self.scale)
            tokens = torch.where(is_fixed, given, tokens)
        self.tokens[:, self.place] = tokens
        sums = ops.sum_rows(logits) if found is None else found.sums
        bad = torch.where(sums.isfinite(), self.ends[-1], position).amin(1)
        self.nonfinite.copy_(torch.minimum(self.nonfinite, bad))

    def add(self) -> None:
        """Add the tokens of the next scale to the canvas, and make the input of the scale after it."""
        with self.clock.measure("commit"):
            if self.captured is None:
                self._add()
            else:
                self.captured.run(("add", self.scale), self._add)
        self.scale += 1

    def _add(self) -> None:
        canvas, following = self.model.add(self.canvas, self.tokens[:, self.place], self.scale)
        self.canvas.copy_(canvas)
        if following is None:
            return
        if (held := self.inputs[self.scale + 1]) is None:
            self.inputs[self.scale + 1] = following.clone()
        else:
            held.copy_(following)

    def check_finite(self) -> None:
        """Raise NonFiniteLogitsError if a pass so far returned logits that are not finite. On a GPU it waits for the passes."""
        position, total = int(self.nonfinite.min()), self.ends[-1]
        if position < total:
            earlier = (record["passes"] for record, end in zip(self._by_scale, self.ends[1:], strict=True) if end <= position)
            raise NonFiniteLogitsError.at(position, total, 1 + sum(earlier))

    def make_progress(self) -> Progress:
        """Return the progress after a pass, before the scale is added to the canvas: its tokens may be changed."""
        length = torch.full((len(self.seeds),), self.place.stop, dtype=torch.int64)
        count = torch.full_like(length, self.place.stop - self.place.start)
        return Progress(self.passes, length, self.ends[-1], count, lambda: self.tokens)

    def make_stats(self, name: str, images: int) -> DecodeStats:
        """Return the statistics of the first `images` slots."""
        committed = Counter(record["tokens"] for record in self._by_scale if record["passes"])
        return DecodeStats(
            accelerator=name,
            images=images,
            tokens=images * self.ends[self.scale],
            passes=self.passes,
            seconds=self.clock.read() - self.clock.started,
            committed_histogram=[images * committed[count] for count in range(max(committed, default=0) + 1)],
            passes_by_width=dict(self._fed["target"]),
            draft_passes_by_width=dict(self._fed["draft"]),
            relaxation=[0.0] * images,
            seconds_by_part=dict(self.clock.parts),
            seeds=self.seeds[:images].tolist(),
            stopped=self.scale < len(self.stages),
            threads=torch.get_num_threads(),
            by_scale=self._by_scale,
        )


# -- schedules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Consecutive scales that are generated in the same way.

    Args:
        until: the first scale after this stage, counted from 0, or from the end if negative; a fraction between 0 and 1 of the
            scales, rounded, at least one less than all; None: all remaining scales.
        model: `"target"`, or `"draft"` for the draft model.
        guidance: factor on the guidance scale; 0 skips the unconditional rows, which is half of the work.
    """

    until: int | float | None = None
    model: Literal["target", "draft"] = "target"
    guidance: float = number_field(1.0, 0)

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.model not in ("target", "draft"):
            raise ValueError(f"model must be target or draft, got {short_repr(self.model)}")
        is_fraction = isinstance(self.until, float) and 0 < self.until < 1
        if self.until is not None and not is_fraction and parse_int(self.until, -(2**31)) is None:
            raise ValueError(f"until must be a whole number, a fraction between 0 and 1, or None, got {short_repr(self.until)}")

    def end(self, scales: int) -> int:
        """Return the first scale after this stage, for a model with `scales` scales."""
        if self.until is None:
            return scales
        if 0 < self.until < 1:
            return min(max(1, round(self.until * scales)), scales - 1)
        return int(self.until) + scales * (self.until < 0)


@dataclass(frozen=True)
class ScaleSchedule(Method):
    """A method for next-scale models.

    Attributes:
        stages: consecutive stages; the last must reach the last scale.
    """

    stages: tuple[Stage, ...] = (Stage(),)
    paradigm: ClassVar[Literal["next-scale"]] = "next-scale"

    def __post_init__(self) -> None:
        if not all(isinstance(stage, Stage) for stage in self.stages):
            raise TypeError(f"stages must be a sequence of Stage, got {short_repr(self.stages)}")
        object.__setattr__(self, "stages", tuple(self.stages))

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        return "exact" if all(stage.model == "target" and stage.guidance == 1 for stage in self.stages) else "relaxed"

    @property
    def sequential_tokens(self) -> bool:
        return self.kind == "exact"

    @property
    def parts(self) -> dict[str, Any]:
        return {str(number): stage for number, stage in enumerate(self.stages, 1)}

    def with_parts(self, parts: dict[str, Any]) -> ScaleSchedule:
        return replace(self, stages=tuple(parts.values()))

    def assign_stages(self, scales: int) -> tuple[Stage, ...]:
        """Return the stage of each of `scales` scales.

        Raises:
            ValueError: if a stage ends after the last scale or has no scale, or the stages end before the last scale.
        """
        found: list[Stage] = []
        for number, stage in enumerate(self.stages, 1):
            end, first = stage.end(scales), len(found) + 1
            if first > scales:
                raise ValueError(f"stage {number} of {self.name!r} has no scale left: earlier stages generate all {scales}")
            if not first <= end <= scales:
                allowed = f"{first} to {scales}, or from {first - scales} to -1, for a model of {scales} scales"
                raise ValueError(f"until of stage {number} of {self.name!r} must be from {allowed}, got {stage.until}")
            found += [stage] * (end - len(found))
        if len(found) < scales:
            raise ValueError(f"the stages of {self.name!r} end at scale {len(found)} of {scales}: the last needs until=None")
        return tuple(found)

    def bind(self, model: ScaleModel) -> tuple[Stage, ...]:
        """Return the stage of each of the model's scales.

        Raises:
            ValueError: if this model cannot run the schedule; says why.
        """
        if any(stage.model == "draft" for stage in self.stages):
            small = model.draft_model
            if small is None:
                raise ValueError(f"{self.name} needs a smaller model of the same image tokenizer: a draft_transformer")
            for name in ("scale_tokens", "scale_codes", "vocab"):
                if (found := getattr(small, name)) != getattr(model, name):
                    raise ValueError(f"the draft model must be of the same image tokenizer: its {name} is {found}")
        stages = self.assign_stages(len(model.scale_tokens))
        for scale, stage in enumerate(stages):
            if stage.guidance > 0 and any(each.model == stage.model and not each.guidance for each in stages[:scale]):
                raise ValueError(f"guidance of the {stage.model} model cannot resume at scale {scale} of {self.name!r}")
        return stages


register_presets(
    ScaleSchedule(
        name="plain",
        summary="one scale per pass: the sequential baseline",
        source="Tian et al. 2024, VAR, arXiv 2404.02905",
    ),
    ScaleSchedule(
        name="code",
        stages=(Stage(until=0.8), Stage(model="draft")),
        summary="collaborative decoding: the small model generates the last fifth of the scales, half of the tokens or more",
        source="Chen et al. 2024, CoDe, arXiv 2411.17787",
    ),
    ScaleSchedule(
        name="economy",
        stages=(Stage(until=-1), Stage(guidance=0)),
        summary="the last scale without guidance, at half the cost",
        source="as plain",
        experimental=True,
    ),
)

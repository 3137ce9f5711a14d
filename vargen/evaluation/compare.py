"""Methods side by side: seconds, passes, relaxation and pictures of the same prompts and seeds, in one run.

Every speed is a ratio to the pipeline's baseline, sequential decoding, within the run. Methods take turns batch by batch, in an
order that rotates, so that a drift of the machine meets all alike.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import DecodeStats, Method, Progress
from vargen.models.condition import Condition
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.model_info import Decoder
from vargen.pipelines.validation import check_batch, check_prompts, check_seed


@dataclass
class MethodResult:
    """One method over all batches. Times cover the decoding loop with its prefill; pixels, which cost all methods the same, are
    left out.

    Attributes:
        kind: `"exact"` or `"relaxed"`.
        seconds_per_image: median over the batches, and the quartiles.
        ratio: median over the batches of the baseline's seconds over this method's, and the quartiles.
        tokens_per_pass: tokens that a pass committed per unfinished image.
        step_cost: mean cost of a step's passes, drafting included, relative to the narrowest pass of the cost curve.
        allowed: what the ratio would be if a step took the time of its passes alone, by the cost curve.
        efficiency: ratio / allowed.
        share_by_part: of the loop's seconds.
        accepted_histogram: `[k]` passes times images that committed k tokens.
        fed: passes by the tokens that they fed to an image.
        relaxation_per_image: mean acceptance granted beyond the exact rule.
        same_as_baseline: images with exactly the tokens of the baseline.
    """

    name: str
    kind: str
    images: int
    seconds_per_image: float = 0.0
    seconds_quartiles: tuple[float, float] = (0.0, 0.0)
    ratio: float = 1.0
    ratio_quartiles: tuple[float, float] = (1.0, 1.0)
    passes_per_batch: float = 0.0
    tokens_per_pass: float = 1.0
    step_cost: float = 1.0
    allowed: float = 1.0
    efficiency: float = 1.0
    share_by_part: dict[str, float] = field(default_factory=dict)
    accepted_histogram: list[int] = field(default_factory=list)
    fed: dict[int, int] = field(default_factory=dict)
    relaxation_per_image: float = 0.0
    same_as_baseline: int = 0


@dataclass
class Comparison:
    """All methods. `cost_curve` is `{tokens fed: seconds of a pass}`; `tokens` int64 `[images, N]` by method."""

    model: str
    baseline: str
    batch: int
    threads: int
    sampling: dict[str, Any]
    prompts: list[str]
    seeds: list[int]
    methods: list[MethodResult]
    cost_curve: dict[int, float]
    tokens: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the tokens left out."""
        return {key: value for key, value in asdict(self).items() if key != "tokens"}


def compare(
    pipe: VisualPipeline,
    prompts: Sequence[str],
    methods: dict[str, Method],
    batch: int = 1,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Draw every prompt with every method; picture i has seed `seed + i` in all of them.

    Args:
        prompts: one picture each; the last batch is filled up from the front.
        methods: by name; must hold the pipeline's `baseline`, what ratios are against.
        settings: guidance_scale, temperature, top_k, top_p where they differ from the checkpoint's.
        progress: called with batches done and to do.

    Raises:
        ValueError: without the baseline, without prompts, for a batch below 1 or beyond 1024, a seed that does not fit 63 bits
            with the last picture's, or a method that this model cannot run.
    """
    if pipe.baseline not in methods:
        raise ValueError(f"methods must include {pipe.baseline!r}, the baseline of every ratio, got {', '.join(methods)}")
    prompts, batch = check_prompts(prompts), check_batch(batch)
    seed = check_seed(seed, -(-len(prompts) // batch) * batch)
    chosen = {**pipe.default_sampling, **(settings or {})}
    decoder = pipe.decoder(chosen)
    filled = [prompts[i % len(prompts)] for i in range(-(-len(prompts) // batch) * batch)]
    condition, _ = pipe.condition(filled)
    seeds = torch.arange(seed, seed + len(filled))
    groups = [slice(start, start + batch) for start in range(0, len(filled), batch)]
    with decoder.threads(condition.rows(groups[0]), batch) as threads:  # one number for all, and the cost curve
        results, drawn, curve = _take_turns(decoder, condition, seeds, groups, methods, pipe.baseline, progress)
    return Comparison(
        model=type(pipe.transformer).__name__,
        baseline=pipe.baseline,
        batch=batch,
        threads=threads,
        sampling=chosen,
        prompts=filled,
        seeds=seeds.tolist(),
        methods=results,
        cost_curve=curve,
        tokens=drawn,
    )


def _take_turns(
    decoder: Decoder,
    condition: Condition,
    seeds: Tensor,
    groups: list[slice],
    methods: dict[str, Method],
    baseline: str,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[MethodResult], dict[str, Tensor], dict[int, float]]:
    """Results, tokens by method, and the cost curve."""
    names, batch = list(methods), groups[0].stop
    for name in names:  # warm-up, and a method that cannot run says so before minutes are spent
        decoder.decode(condition.rows(groups[0]), seeds[groups[0]], methods[name], callback=_few_passes)
    runs: dict[str, list[DecodeStats]] = {name: [] for name in names}
    tokens: dict[str, list[Tensor]] = {name: [] for name in names}
    total = len(groups) * len(names)
    for turn, group in enumerate(groups):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            result = decoder.decode(condition.rows(group), seeds[group], methods[name])
            runs[name].append(result.stats)
            tokens[name].append(result.tokens.cpu())
            if progress:
                progress(sum(map(len, runs.values())), total)
    drawn = {name: torch.cat(parts) for name, parts in tokens.items()}
    shares = runs
    if decoder.device.type == "cuda":  # the time of a part is known if the host waits for the device, which timed runs do not
        first = condition.rows(groups[0]), seeds[groups[0]]
        shares = {name: [decoder.decode(*first, methods[name], profile=True).stats] for name in names}
    widths = sorted({width for stats in runs.values() for run in stats for width in run.fed})
    curve = decoder.measure_pass_costs(condition.rows(groups[0]), batch, widths)
    shown = condition.rows(groups[0])
    spent = {name: decoder.spent(methods[name], runs[name], curve, shown, batch) for name in names}
    results = [_result(methods[name], name, runs, baseline, drawn, curve, spent, batch) for name in names]
    for measured in results:
        whole = sum(run.seconds for run in shares[measured.name])
        parts = sum((Counter(run.seconds_by_part) for run in shares[measured.name]), Counter())
        measured.share_by_part = {part: value / whole for part, value in parts.items()}
    return results, drawn, curve


def _few_passes(progress: Progress) -> bool:
    return progress.step < 12


def _spread(values: list[float]) -> tuple[float, tuple[float, float]]:
    """Median and quartiles."""
    if len(values) == 1:
        return values[0], (values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (low, high)


def _result(
    method: Method,
    name: str,
    runs: dict[str, list[DecodeStats]],
    baseline: str,
    tokens: dict[str, Tensor],
    curve: dict[int, float],
    spent: dict[str, tuple[float, int]],
    batch: int,
) -> MethodResult:
    own, ratio_to = runs[name], runs[baseline]
    result = MethodResult(name, method.kind, images=sum(run.images for run in own))
    result.seconds_per_image, result.seconds_quartiles = _spread([run.seconds / batch for run in own])
    ratios = [slow.seconds / run.seconds for slow, run in zip(ratio_to, own, strict=True)]
    result.ratio, result.ratio_quartiles = _spread(ratios)
    result.passes_per_batch = statistics.mean(run.passes for run in own)
    result.tokens_per_pass = sum(run.tokens for run in own) / sum(sum(run.accepted_histogram) for run in own)
    seconds, passes = spent[name]
    result.step_cost = seconds / passes / curve[min(curve)]
    result.allowed = spent[baseline][0] / seconds
    result.efficiency = result.ratio / result.allowed
    longest = max(len(run.accepted_histogram) for run in own)
    padded = [run.accepted_histogram + [0] * (longest - len(run.accepted_histogram)) for run in own]
    result.accepted_histogram = [sum(column) for column in zip(*padded, strict=True)]
    result.fed = {width: sum(run.fed.get(width, 0) for run in own) for width in sorted({w for run in own for w in run.fed})}
    relaxation = [value for run in own for value in run.relaxation]
    result.relaxation_per_image = statistics.mean(relaxation)
    result.same_as_baseline = int((tokens[name] == tokens[baseline]).all(1).sum())
    return result

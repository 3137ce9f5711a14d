"""Side-by-side comparison of methods: seconds, passes, relaxation and images for the same prompts and seeds, in one run.

Every speedup is relative to the pipeline's baseline, sequential decoding, within the run. Methods alternate batch by batch in a
rotating order, so that a gradual change in the machine's speed affects all of them equally.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import DecodeOutput, DecodeStats, Method, Progress, Sampling, decode, decode_scales
from vargen.decoding.costs import token_threads
from vargen.device import limit_threads
from vargen.models.guidance import Condition
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.seeds import resolve_seeds
from vargen.pipelines.validation import validate_batch_size, validate_prompts, validate_sampling, validate_seed


@dataclass
class MethodResult:
    """Results of one method over all batches. Times include prefill, but not pixel decoding, which costs all methods the same.

    Attributes:
        kind: `"exact"` or `"relaxed"`.
        seconds_per_image: median and quartiles over the batches.
        speedup: over the baseline; median and quartiles over the batches.
        tokens_per_pass: tokens committed per pass and unfinished image.
        share_by_part: share of the loop's seconds by part.
        committed_histogram: `[k]` passes times images that committed k tokens.
        passes_by_width: number of passes by tokens fed per image.
        relaxation_per_image: mean excess acceptance beyond the exact rule.
        num_identical_images: number of images with exactly the baseline's tokens.
    """

    name: str
    kind: str
    images: int
    seconds_per_image: float = 0.0
    seconds_quartiles: tuple[float, float] = (0.0, 0.0)
    speedup: float = 1.0
    speedup_quartiles: tuple[float, float] = (1.0, 1.0)
    passes_per_batch: float = 0.0
    tokens_per_pass: float = 1.0
    share_by_part: dict[str, float] = field(default_factory=dict)
    committed_histogram: list[int] = field(default_factory=list)
    passes_by_width: dict[int, int] = field(default_factory=dict)
    relaxation_per_image: float = 0.0
    num_identical_images: int = 0


@dataclass
class Comparison:
    """Results of all methods. `tokens` are int64 `[images, N]` by method."""

    model: str
    baseline: str
    batch: int
    threads: int
    sampling: dict[str, Any]
    prompts: list[str]
    seeds: list[int]
    methods: list[MethodResult]
    tokens: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the tokens."""
        return {key: value for key, value in asdict(self).items() if key != "tokens"}


def compare_methods(
    pipe: VisualPipeline,
    prompts: Sequence[str | int],
    methods: dict[str, Method],
    batch: int = 1,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    num_tokens: int | None = None,
) -> Comparison:
    """Generate an image of every prompt with every method; image i is that of `vargen generate` with seed `seed + i`.

    Args:
        prompts: one image each, or classes; the last batch is filled up with the first prompts.
        methods: by name; must include the pipeline's `baseline`, which speedups are relative to.
        settings: guidance_scale, temperature, top_k, top_p, min_p where they differ from the checkpoint's.
        progress: called with the numbers of finished batches and of all batches.
        num_tokens: end each image after this many tokens, for next-token models; the others are left out of `tokens`.
    """
    if pipe.baseline not in methods:
        raise ValueError(f"methods must include {pipe.baseline!r}, the baseline of every ratio, got {', '.join(methods)}")
    batch, is_class = validate_batch_size(batch), pipe.is_class_conditional
    subjects: list[Any] = list(prompts) if is_class else validate_prompts(prompts)
    seed = validate_seed(seed, -(-len(subjects) // batch) * batch)
    chosen = {**pipe.default_sampling, **(settings or {})}
    decoder = open_decoder(pipe, chosen)
    filled = [subjects[i % len(subjects)] for i in range(-(-len(subjects) // batch) * batch)]
    condition, _ = pipe.encode_condition(class_labels=filled) if is_class else pipe.encode_condition(filled)
    seeds = list(range(seed, seed + len(filled)))
    noise_seeds = resolve_seeds([torch.Generator().manual_seed(each) for each in seeds], len(seeds)).noise_seeds
    groups = [slice(start, start + batch) for start in range(0, len(filled), batch)]
    with decoder.limit_threads(condition.select_rows(groups[0]), batch):  # one count for all methods
        threads = torch.get_num_threads()
        results, all_tokens = _run_interleaved(
            decoder, condition, noise_seeds, groups, methods, pipe.baseline, progress, num_tokens
        )
    return Comparison(
        model=type(pipe.transformer).__name__,
        baseline=pipe.baseline,
        batch=batch,
        threads=threads,
        sampling=chosen,
        prompts=[str(each) for each in filled],
        seeds=seeds,
        methods=results,
        tokens=all_tokens,
    )


def _run_interleaved(
    decoder: FixedDecoder,
    condition: Condition,
    seeds: Tensor,
    groups: list[slice],
    methods: dict[str, Method],
    baseline: str,
    progress: Callable[[int, int], None] | None,
    num_tokens: int | None,
) -> tuple[list[MethodResult], dict[str, Tensor]]:
    """Run the methods in rotation; returns the results, and the tokens by method."""
    names, batch = list(methods), groups[0].stop
    stop = None if num_tokens is None else partial(_stop_after, num_tokens)
    for name in names:  # warm-up; also fails early if a method cannot run
        decoder.decode(condition.select_rows(groups[0]), seeds[groups[0]], methods[name], callback=_stop_after_warmup)
    runs: dict[str, list[DecodeStats]] = {name: [] for name in names}
    tokens: dict[str, list[Tensor]] = {name: [] for name in names}
    total = len(groups) * len(names)
    for turn, group in enumerate(groups):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            result = decoder.decode(condition.select_rows(group), seeds[group], methods[name], callback=stop)
            runs[name].append(result.stats)
            tokens[name].append(result.tokens[:, :num_tokens].cpu())
            if progress:
                progress(sum(map(len, runs.values())), total)
    all_tokens = {name: torch.cat(parts) for name, parts in tokens.items()}
    shares = runs
    if decoder.device.type == "cuda":  # times of parts need the host to wait for the device, which timed runs avoid
        first = condition.select_rows(groups[0]), seeds[groups[0]]
        shares = {name: [decoder.decode(*first, methods[name], callback=stop, profile=True).stats] for name in names}
    results = [_result(methods[name], name, runs, baseline, all_tokens, batch) for name in names]
    for measured in results:
        whole = sum(run.seconds for run in shares[measured.name])
        parts = sum((Counter(run.seconds_by_part) for run in shares[measured.name]), Counter())
        measured.share_by_part = {part: value / whole for part, value in parts.items()}
    return results, all_tokens


def _stop_after_warmup(progress: Progress) -> bool:
    return progress.step < 12


def _stop_after(num_tokens: int, progress: Progress) -> bool:
    return int(progress.length.min()) < num_tokens


def _spread(values: list[float]) -> tuple[float, tuple[float, float]]:
    """Return the median and quartiles."""
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
    batch: int,
) -> MethodResult:
    own, ratio_to = runs[name], runs[baseline]
    result = MethodResult(name, method.kind, images=sum(run.images for run in own))
    result.seconds_per_image, result.seconds_quartiles = _spread([run.seconds / batch for run in own])
    ratios = [slow.seconds / run.seconds for slow, run in zip(ratio_to, own, strict=True)]
    result.speedup, result.speedup_quartiles = _spread(ratios)
    result.passes_per_batch = statistics.mean(run.passes for run in own)
    merged = DecodeStats.merge(own)
    result.tokens_per_pass = merged.tokens_per_pass
    result.committed_histogram = merged.committed_histogram
    result.passes_by_width = dict(sorted(merged.passes_by_width.items()))
    result.relaxation_per_image = statistics.mean(merged.relaxation)
    result.num_identical_images = int((tokens[name] == tokens[baseline]).all(1).sum())
    return result


# -- fixed guidance and sampling, any method -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedDecoder:
    """Generates tokens with a decoding model and fixed sampling."""

    model: Any
    sampling: Sampling
    paradigm: str

    @property
    def device(self) -> torch.device:
        return self.model.device

    def decode(
        self,
        condition: Condition,
        seeds: Tensor,
        method: Any,
        callback: Callable[[Progress], bool | None] | None = None,
        profile: bool = False,
    ) -> DecodeOutput:
        """Generate B images with a preset (by name) or a method; see `vargen.decoding.decode`."""
        loop: Any = decode_scales if self.paradigm == "next-scale" else decode
        return loop(self.model, condition, seeds, method, self.sampling, callback=callback, profile=profile)

    def limit_threads(self, condition: Condition, batch: int) -> AbstractContextManager[None]:
        """Use the autotuned number of CPU threads while the block runs; torch's own for the wide passes of scales."""
        return limit_threads(None if self.paradigm == "next-scale" else token_threads(self.model, condition, batch, 1))


def open_decoder(pipe: VisualPipeline, settings: Mapping[str, Any] | None = None) -> FixedDecoder:
    """Return the decoder of an image pipeline.

    Args:
        settings: `guidance_scale`, `temperature`, `top_k`, `top_p` and `min_p` where they differ from the checkpoint's.
    """
    scale, sampling = validate_sampling({**pipe.default_sampling, **(settings or {})})
    return FixedDecoder(pipe.decoding_model(scale), sampling, pipe.paradigm)

"""Side-by-side comparison of video methods on the same prompts and seeds: seconds, scores, flicker, frame distances.

Methods alternate for each prompt, so that other load on the machine slows all of them equally.

Shape suffixes: F frames, D features.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import SingleModel, VideoMethod, VideoStats
from vargen.eval.features import Extractor, FeatureStatistics
from vargen.eval.metrics import frechet_distance
from vargen.scoring.protocol import Scorer, score_images

ProgressCallback = Callable[[int, int], None]
# All blocks by the small model: the lower end of a comparison, under the name `draft`.
DRAFTS = VideoMethod("draft", policy=SingleModel(draft=True), target_blocks=())


@dataclass
class VideoMethodResult:
    """Results of one method over all prompts.

    Attributes:
        name, kind: of the method. seconds: median per video. speedup: median over the baseline on the same prompts.
            acceptance: fraction of drafts accepted; None without drafts. target_fraction: fraction of blocks by the target.
        score: mean over all frames by the table's scorer, which may differ from the routing scorer. quality_retained: (score -
            drafter) / (target - drafter) in scores: 1 is the target's quality, 0 the drafter's; None if the two do not differ.
        flicker: mean absolute second difference over
            time, in [0, 1], which is zero for motion at constant speed. motion: mean absolute first difference.
        block_discontinuity: mean amount by which changes between blocks exceed those within blocks, in [0, 1].
        distance: Frechet distance of frame features to the baseline's; None without an extractor or with too few frames.
        passes: mean per video, by model. failures: scores that could not be used.
    """

    name: str
    kind: str
    seconds: float = 0.0
    speedup: float = 1.0
    acceptance: float | None = None
    target_fraction: float = 1.0
    score: float = 0.0
    quality_retained: float | None = None
    flicker: float = 0.0
    motion: float = 0.0
    block_discontinuity: float = 0.0
    distance: float | None = None
    passes: dict[str, float] = field(default_factory=dict)
    failures: int = 0


@dataclass
class VideoComparison:
    """Results of methods on prompts.

    Attributes:
        methods: a row each, the baseline first.
        frames: by method, the first videos, uint8 `[F, Y, X, 3]`. runs: by method, statistics of each video.
    """

    prompts: list[str]
    seed: int
    blocks: int
    scorer: str
    methods: list[VideoMethodResult]
    frames: dict[str, list[Any]]
    runs: dict[str, list[VideoStats]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = {name: getattr(self, name) for name in ("prompts", "seed", "blocks", "scorer")}
        runs = {name: [run.to_dict() for run in each] for name, each in self.runs.items()}
        return {**plain, "methods": [asdict(each) for each in self.methods], "runs": runs}


def flicker(frames_FCYX: Tensor) -> float:
    """Return the mean absolute second difference over time; 0 for fewer than three frames."""
    return float(frames_FCYX.diff(n=2, dim=0).abs().mean()) if len(frames_FCYX) > 2 else 0.0


def block_discontinuity(frames_FCYX: Tensor, sizes: Sequence[int]) -> float:
    """Return the mean excess of changes between blocks (of `sizes` frames) over the mean change within blocks, clipped at 0."""
    steps = frames_FCYX.diff(dim=0).abs().mean((1, 2, 3))
    borders = torch.tensor(sizes[:-1]).cumsum(0) - 1
    within = torch.ones(len(steps), dtype=torch.bool)
    within[borders] = False
    if not len(borders) or not within.any():
        return 0.0
    return float((steps[borders] - steps[within].mean()).clamp_min(0).mean())


def compare_video_methods(
    pipe: Any,
    prompts: Sequence[str],
    methods: Mapping[str, VideoMethod],
    *,
    num_blocks: int | None = None,
    seed: int = 0,
    scorer: Scorer | None = None,
    extractor: Extractor | None = None,
    options: Mapping[str, Any] | None = None,
    num_saved: int = 4,
    progress: ProgressCallback | None = None,
) -> VideoComparison:
    """Generate a video of each prompt with each method, and compare them.

    Args:
        pipe: a video pipeline, opened by the registry.
        methods: by name; the baseline, `pipe.baseline`, must be among them.
        num_blocks: blocks per video; None: the checkpoint's default. seed: of the first prompt; the next has seed + 1.
        scorer: scores the frames for the table; None: the packaged scorer. Preferably not the scorer used for routing.
        extractor: of the frames' features.
        options: for the pipeline's call, such as `scorer` and `window`.
        num_saved: number of videos per method whose frames are kept for viewing.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one, got none")
    if pipe.baseline not in methods:
        raise ValueError(f"methods must hold the baseline, {pipe.baseline!r}, got {', '.join(methods)}")
    scorer = pipe.resolve_frame_scorer(None).scorer if scorer is None else scorer
    results = {name: _Accumulator() for name in methods}
    names, done = list(methods), 0
    for number, prompt in enumerate(prompts):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            generator = torch.Generator().manual_seed(seed + number)
            given = {"image": False, "profile": True, **(options or {})}  # methods differ in what they generate themselves
            stream = pipe.stream(prompt, accelerator=methods[name], num_blocks=num_blocks, generator=generator, **given)
            results[name].add(stream, pipe.scorer_prompt(prompt), scorer, extractor, number < num_saved)
            done += 1
            if progress is not None:
                progress(done, len(prompts) * len(names))
    return _summarize(pipe, list(prompts), seed, methods, results, scorer.name)


class _Accumulator:
    """Statistics, scores, features and frames of a method's videos."""

    def __init__(self) -> None:
        self.runs: list[VideoStats] = []
        self.scores: list[Tensor] = []
        self.flicker: list[float] = []
        self.motion: list[float] = []
        self.discontinuities: list[float] = []
        self.features: list[Tensor] = []
        self.frames: list[Any] = []
        self.blocks = 0

    def add(self, stream: Any, text: str, scorer: Scorer, extractor: Extractor | None, keep: bool) -> None:
        parts = [block.frames.cpu() for block in stream]
        frames = torch.cat(parts)
        self.runs.append(stream.stats)
        self.blocks = len(parts)
        scores = score_images(scorer, frames, [text] * len(frames))
        self.scores.append(scores if scorer.higher_is_better else -scores)
        self.flicker.append(flicker(frames))
        self.motion.append(float(frames.diff(dim=0).abs().mean()) if len(frames) > 1 else 0.0)
        self.discontinuities.append(block_discontinuity(frames, [len(part) for part in parts]))
        pixels = frames.mul(255).round().byte()
        if extractor is not None:
            self.features.append(extractor(pixels).pooled)
        if keep:
            self.frames.append(pixels.permute(0, 2, 3, 1).numpy())


def _summarize(
    pipe: Any, prompts: list[str], seed: int, methods: Mapping[str, VideoMethod], results: dict[str, _Accumulator], scorer: str
) -> VideoComparison:
    base = results[pipe.baseline]
    ends = [float(torch.cat(results[name].scores).mean()) for name in ("draft", pipe.baseline) if name in results]
    rows = []
    for name, method in methods.items():
        result = results[name]
        row = VideoMethodResult(name, method.kind)
        row.seconds = statistics.median(run.seconds for run in result.runs)
        row.speedup = statistics.median(b.seconds / a.seconds for a, b in zip(result.runs, base.runs, strict=True) if a.seconds)
        row.acceptance = VideoStats(name, seed, [block for run in result.runs for block in run.blocks]).acceptance
        sources = [source for run in result.runs for source in run.sources]
        row.target_fraction = 1 - sources.count("draft") / max(1, len(sources))
        scores = torch.cat(result.scores)
        row.score = float(scores.mean())
        if len(ends) == 2 and ends[1] != ends[0]:
            row.quality_retained = (row.score - ends[0]) / (ends[1] - ends[0])
        row.flicker, row.motion = statistics.mean(result.flicker), statistics.mean(result.motion)
        row.block_discontinuity = statistics.mean(result.discontinuities)
        row.distance = _distance(result, base)
        row.passes = {who: statistics.mean(run.passes.get(who, 0) for run in result.runs) for who in ("target", "draft")}
        row.failures = sum(len(run.failures) for run in result.runs)
        rows.append(row)
    rows.sort(key=lambda row: row.name != pipe.baseline)
    frames, runs = ({name: getattr(each, what) for name, each in results.items()} for what in ("frames", "runs"))
    return VideoComparison(prompts, seed, base.blocks, scorer, rows, frames, runs)


def _distance(result: _Accumulator, base: _Accumulator) -> float | None:
    if not result.features:
        return None
    features, others = torch.cat(result.features), torch.cat(base.features)
    if len(features) <= features.shape[1] or len(others) <= others.shape[1]:
        return None  # their covariance would be singular
    return frechet_distance(FeatureStatistics.from_features(features), FeatureStatistics.from_features(others))

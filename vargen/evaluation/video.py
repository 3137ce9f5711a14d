"""Side-by-side comparison of video methods on the same prompts and seeds: seconds, scores, drift, flicker, frame distances.

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

from vargen.decoding import VideoMethod, VideoStats
from vargen.decoding.video.stats import BlockCosts, estimate_block_costs, mean_acceptance
from vargen.evaluation.distances import frechet_distance
from vargen.evaluation.features import Extractor
from vargen.evaluation.reference_statistics import Statistics
from vargen.scoring.protocol import Scorer, score_images

Show = Callable[[int, int], None]


@dataclass
class MethodResult:
    """Results of one method over all prompts.

    Attributes:
        name, kind: of the method. seconds: median per video. ratio: median speedup over the baseline on the same prompts.
            acceptance: fraction of drafts accepted; None without drafts. target_share: fraction of blocks by the target.
        score: mean over all frames by the table's scorer, which may differ from the routing scorer. retained: (score - drafter)
            / (target - drafter) in scores: 1 is the target's quality, 0 the drafter's; None if the two do not differ. worst:
            mean over videos of the worst frame's score.
        drift: mean score of the last third of the frames minus that of the first. flicker: mean absolute second difference over
            time, in [0, 1], which is zero for motion at constant speed. motion: mean absolute first difference.
        jump: mean amount by which changes between blocks exceed those within blocks, in [0, 1].
        distance: Frechet distance of frame features to the baseline's; None without an extractor or with too few frames.
        predicted: seconds by the cost model over measured seconds; None if costs were not measured.
        passes: mean per video, by model. failures: scores that could not be used.
    """

    name: str
    kind: str
    seconds: float = 0.0
    ratio: float = 1.0
    acceptance: float | None = None
    target_share: float = 1.0
    score: float = 0.0
    retained: float | None = None
    worst: float = 0.0
    drift: float = 0.0
    flicker: float = 0.0
    motion: float = 0.0
    jump: float = 0.0
    distance: float | None = None
    predicted: float | None = None
    passes: dict[str, float] = field(default_factory=dict)
    failures: int = 0


@dataclass
class VideoComparison:
    """Results of methods on prompts.

    Attributes:
        methods: a row each, the baseline first. costs: seconds of each part; None if they could not be measured.
        frames: by method, the first videos, uint8 `[F, Y, X, 3]`. runs: by method, statistics of each video.
    """

    prompts: list[str]
    seed: int
    blocks: int
    scorer: str
    methods: list[MethodResult]
    costs: BlockCosts | None
    break_even_acceptance: float | None
    frames: dict[str, list[Any]]
    runs: dict[str, list[VideoStats]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = {name: getattr(self, name) for name in ("prompts", "seed", "blocks", "scorer", "break_even_acceptance")}
        costs = None if self.costs is None else asdict(self.costs)
        runs = {name: [run.to_dict() for run in each] for name, each in self.runs.items()}
        return {**plain, "costs": costs, "methods": [asdict(each) for each in self.methods], "runs": runs}


def flicker(frames_FCYX: Tensor) -> float:
    """Return the mean absolute second difference over time; 0 for fewer than three frames."""
    return float(frames_FCYX.diff(n=2, dim=0).abs().mean()) if len(frames_FCYX) > 2 else 0.0


def drift(scores_F: Tensor) -> float:
    """Return the mean of the last third minus the mean of the first third; 0 for fewer than three frames."""
    third = len(scores_F) // 3
    return float(scores_F[-third:].mean() - scores_F[:third].mean()) if third else 0.0


def block_jumps(frames_FCYX: Tensor, sizes: Sequence[int]) -> float:
    """Return the mean excess of changes between blocks (of `sizes` frames) over the mean change within blocks, clipped at 0."""
    steps = frames_FCYX.diff(dim=0).abs().mean((1, 2, 3))
    borders = torch.tensor(sizes[:-1]).cumsum(0) - 1
    within = torch.ones(len(steps), dtype=torch.bool)
    within[borders] = False
    if not len(borders) or not within.any():
        return 0.0
    return float((steps[borders] - steps[within].mean()).clamp_min(0).mean())


def compare_videos(
    pipe: Any,
    prompts: Sequence[str],
    methods: Mapping[str, VideoMethod],
    *,
    num_blocks: int | None = None,
    seed: int = 0,
    judge: Scorer | None = None,
    extractor: Extractor | None = None,
    options: Mapping[str, Any] | None = None,
    kept: int = 4,
    progress: Show | None = None,
) -> VideoComparison:
    """Generate a video of each prompt with each method, and compare them.

    Args:
        pipe: a video pipeline, opened by the registry.
        methods: by name; the baseline, `pipe.baseline`, must be among them.
        num_blocks: blocks per video; None: the checkpoint's default. seed: of the first prompt; the next has seed + 1.
        judge: scores the frames for the table; None: the packaged scorer. Preferably not the scorer used for routing.
        extractor: of the frames' features.
        options: for the pipeline's call, such as `scorer` and `window`.
        kept: number of videos per method whose frames are kept for viewing.

    Raises:
        ValueError: there are no prompts, or the methods lack the baseline.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one, got none")
    if pipe.baseline not in methods:
        raise ValueError(f"methods must hold the baseline, {pipe.baseline!r}, got {', '.join(methods)}")
    scorer = pipe.resolve_frame_scorer(None).scorer if judge is None else judge
    seen = {name: _Seen() for name in methods}
    names, done = list(methods), 0
    for number, prompt in enumerate(prompts):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            generator = torch.Generator().manual_seed(seed + number)
            stream = pipe.stream(
                prompt, accelerator=methods[name], num_blocks=num_blocks, generator=generator, profile=True, **(options or {})
            )
            seen[name].add(stream, pipe.scorer_prompt(prompt), scorer, extractor, number < kept)
            done += 1
            if progress is not None:
                progress(done, len(prompts) * len(names))
    return _told(pipe, list(prompts), seed, methods, seen, scorer.name)


class _Seen:
    """What is kept of a method's videos."""

    def __init__(self) -> None:
        self.runs: list[VideoStats] = []
        self.scores: list[Tensor] = []
        self.flicker: list[float] = []
        self.motion: list[float] = []
        self.jumps: list[float] = []
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
        self.jumps.append(block_jumps(frames, [len(part) for part in parts]))
        pixels = frames.mul(255).round().byte()
        if extractor is not None:
            self.features.append(extractor(pixels).pooled)
        if keep:
            self.frames.append(pixels.permute(0, 2, 3, 1).numpy())


def _told(
    pipe: Any, prompts: list[str], seed: int, methods: Mapping[str, VideoMethod], seen: dict[str, _Seen], scorer: str
) -> VideoComparison:
    base = seen[pipe.baseline]
    steps = len(pipe.decoding_model().levels)
    refused = [name for name, method in methods.items() if method.policy.scored]
    costs = None
    if "draft" in methods and refused:
        judged = [run for name in refused for run in seen[name].runs]
        if any(row.verdict == "rejected" for run in judged for row in run.blocks):
            costs = estimate_block_costs(base.runs, seen["draft"].runs, judged)
    ends = [float(torch.cat(seen[name].scores).mean()) for name in ("draft", pipe.baseline) if name in seen]
    rows = []
    for name, method in methods.items():
        own = seen[name]
        row = MethodResult(name, method.kind)
        row.seconds = statistics.median(run.seconds for run in own.runs)
        row.ratio = statistics.median(b.seconds / a.seconds for a, b in zip(own.runs, base.runs, strict=True) if a.seconds)
        row.acceptance = mean_acceptance(own.runs)
        makers = [maker for run in own.runs for maker in run.makers]
        row.target_share = 1 - makers.count("draft") / max(1, len(makers))
        scores = torch.cat(own.scores)
        row.score, row.worst = float(scores.mean()), statistics.mean(float(each.min()) for each in own.scores)
        if len(ends) == 2 and ends[1] != ends[0]:
            row.retained = (row.score - ends[0]) / (ends[1] - ends[0])
        row.drift = statistics.mean(drift(each) for each in own.scores)
        row.flicker, row.motion, row.jump = (statistics.mean(each) for each in (own.flicker, own.motion, own.jumps))
        row.distance = _distance(own, base)
        if costs is not None:
            ratios = [costs.predicted(run, method.policy.scored) / run.seconds for run in own.runs if run.seconds]
            row.predicted = statistics.median(ratios)
        row.passes = {who: statistics.mean(run.passes.get(who, 0) for run in own.runs) for who in ("target", "draft")}
        row.failures = sum(len(run.failures) for run in own.runs)
        rows.append(row)
    rows.sort(key=lambda row: row.name != pipe.baseline)
    even = None if costs is None else costs.break_even_acceptance(steps)
    frames, runs = ({name: getattr(each, what) for name, each in seen.items()} for what in ("frames", "runs"))
    return VideoComparison(prompts, seed, base.blocks, scorer, rows, costs, even, frames, runs)


def _distance(own: _Seen, base: _Seen) -> float | None:
    if not own.features:
        return None
    features, others = torch.cat(own.features), torch.cat(base.features)
    if len(features) <= features.shape[1] or len(others) <= others.shape[1]:
        return None  # their covariance would be singular
    return frechet_distance(Statistics.of(features), Statistics.of(others))

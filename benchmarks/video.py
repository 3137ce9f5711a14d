"""Policies for video at equal time, on the synthetic pair whose gap is known, or on a packaged pair.

    OMP_NUM_THREADS=1 python benchmarks/video.py --output benchmarks/video_NAME_DATE
    OMP_NUM_THREADS=1 python benchmarks/video.py --model emoji-video --prompt-file FILE [--preview] --output ...

Each policy is run over a range of its one setting. Runs take turns, so that other work slows all alike. Writes OUTPUT.json,
OUTPUT.md and OUTPUT.png: quality against time, a table at equal times, and measured seconds beside those that the cost model
predicts of passes and verdicts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vargen.decoding import (
    PRESETS,
    LearnedRouting,
    QuantileThreshold,
    RandomShare,
    RelativeThreshold,
    Stride,
    Threshold,
    VideoMethod,
    VideoStats,
)
from vargen.decoding.harness import Clock
from vargen.decoding.video.loop import decode_video
from vargen.decoding.video.stats import BlockCosts, estimate_block_costs, mean_acceptance
from vargen.device import describe_machine
from vargen.evaluation.synthetic_video import (
    PUBLISHED,
    PUBLISHED_DRAFTER,
    SyntheticDecoder,
    Work,
    noisy_router,
    noisy_score,
    quality,
    synthetic_pair,
)
from vargen.scoring.frames import FrameScorer
from vargen.scoring.protocol import score_images

SPEEDUPS = (1.3, 1.6, 1.9, 2.1, 2.4)


@dataclass
class Point:
    """One method over all videos."""

    policy: str
    setting: str
    method: VideoMethod
    runs: list[VideoStats] = field(default_factory=list)
    quality: list[float] = field(default_factory=list)


def points(thresholds: list[float], deltas: list[float]) -> list[Point]:
    """The policies, each over its setting."""
    base = PRESETS["sdvg"]
    found = [Point("target", "", PRESETS["target"]), Point("draft", "", PRESETS["draft"])]
    found += [Point("threshold", f"{tau:g}", replace(base, policy=Threshold(tau))) for tau in thresholds]
    found += [Point("capped", f"{tau:g}", replace(base, policy=Threshold(tau), max_accepted_in_row=6)) for tau in thresholds]
    found += [Point("relative", f"{d:g}", replace(base, policy=RelativeThreshold(d))) for d in deltas]
    shares = (0.05, 0.15, 0.3, 0.45, 0.6)
    found += [Point("quantile", f"{share:g}", replace(base, policy=QuantileThreshold(share))) for share in shares]
    found += [Point("stride", f"{every}", replace(base, policy=Stride(every))) for every in (2, 3, 4, 6, 10)]
    found += [
        Point("chance", f"{share:g}", replace(base, policy=RandomShare(share))) for share in (0.5, 0.65, 0.75, 0.85, 0.95)
    ]
    return found


def packaged_points(has_router: bool, steps: int) -> list[Point]:
    """Further policies, which need trained weights."""
    exits = [Point("early exit", f"{k}", replace(PRESETS["early-exit"], exit_step=k)) for k in range(1, steps)]
    return exits + (learned_points() if has_router else [])


Runner = Callable[[VideoMethod, int], tuple[VideoStats, float]]


def learned_points() -> list[Point]:
    """Learned routing over its setting."""
    shares = (0.5, 0.7, 0.85, 0.92, 0.97)
    return [Point("learned", f"{each:g}", replace(PRESETS["sdvg-learned"], policy=LearnedRouting(each))) for each in shares]


def synthetic(work: Work, preview: bool, blocks: int, correlation: float | None) -> Runner:
    """Runs a method on the synthetic pair; quality is known exactly."""
    model, full = synthetic_pair(work), SyntheticDecoder(work.decode)
    cheap = SyntheticDecoder(work.preview) if preview else None

    def run(method: VideoMethod, seed: int) -> tuple[VideoStats, float]:
        score = noisy_score(seed, products=work.score) if method.needs_scorer else None
        router = None if correlation is None else noisy_router(seed, correlation, work.errors)
        given = {"router": router} if method.policy.needs_router else {}
        stream = decode_video(
            model, seed, seed, method, blocks=blocks, decoder=full, preview=cheap, score=score, run_ahead=False, **given
        )
        found = [quality(seed, block.number, block.latents) for block in stream]
        return stream.stats, statistics.mean(found)

    return run


class Packaged:
    """Runs a method on a model's own pair; quality is the mean score of all frames.

    Attributes:
        strangers: by seed, the mean score of the target's video under the next prompt, which it does not show: the zero of
            `of_target`, for a score has no zero of its own.
    """

    def __init__(self, name: str, prompts: list[str], blocks: int, preview: bool, frames: int | None):
        from vargen.pipelines.registry import open_pipeline

        self.pipe: Any = open_pipeline(name)
        if not preview:
            self.pipe.preview_decoder = None
        elif self.pipe.preview_decoder is None:
            raise SystemExit(f"error: {name} has no decoder of previews")
        self.scorer, self.prompts, self.blocks = self.pipe.resolve_frame_scorer().scorer, prompts, blocks
        self.judge = FrameScorer(self.scorer, frames=frames)
        self.strangers: dict[int, float] = {}

    def __call__(self, method: VideoMethod, seed: int) -> tuple[VideoStats, float]:
        prompt, other = (self.prompts[(seed + k) % len(self.prompts)] for k in range(2))
        source = torch.Generator().manual_seed(seed)
        judge = {"scorer": self.judge} if method.needs_scorer else {}
        stream = self.pipe.stream(
            prompt, accelerator=method, num_blocks=self.blocks, generator=source, run_ahead=False, **judge
        )
        frames = torch.cat([block.frames for block in stream])
        if method.name == "target":
            self.strangers[seed] = self._score(frames, other)
        return stream.stats, self._score(frames, prompt)

    def _score(self, frames: torch.Tensor, prompt: str) -> float:
        return float(score_images(self.scorer, frames, [self.pipe.scorer_prompt(prompt)] * len(frames)).mean())


def measured(found: list[Point], run: Runner, videos: int) -> list[BlockCosts]:
    """Run all, taking turns; what the parts of a block cost, by video: a machine that others use changes its speed."""
    costs: list[BlockCosts] = []
    for seed in range(videos):
        for place in range(len(found)):
            point = found[(place + seed) % len(found)]
            stats, value = run(point.method, seed)
            point.runs.append(stats)
            point.quality.append(value)
        own = {point.policy: [point.runs[-1]] for point in found}
        refused = [point.runs[-1] for point in found if point.method.policy.needs_scores]
        costs.append(estimate_block_costs(own["target"], own["draft"], refused))
    return costs


def median_costs(costs: list[BlockCosts]) -> BlockCosts:
    """Part by part."""
    found = {name: [getattr(each, name) for each in costs] for name in vars(costs[0])}
    return BlockCosts(**{name: None if None in values else statistics.median(values) for name, values in found.items()})


def share_intervals(found: list[Point], zero: np.ndarray, resamples: int = 2000) -> list[list[float]]:
    """95 % intervals, over videos, of each point's share of the target's quality; `zero`: by video, what counts as none."""
    chosen = np.random.default_rng(0).integers(len(zero), size=(resamples, len(zero)))
    none, target = zero[chosen].mean(1), np.array(found[0].quality)[chosen].mean(1)
    shares = [(np.array(point.quality)[chosen].mean(1) - none) / (target - none) for point in found]
    return [np.quantile(each, (0.025, 0.975)).tolist() for each in shares]


def rows(found: list[Point], costs: BlockCosts, each: list[BlockCosts], zeros: np.ndarray) -> list[dict[str, object]]:
    """A row of numbers for each point. `modelled` seconds are those of the cost model: equal work is equal time; what is
    predicted of a video is by the costs `each` of its own turn. `zeros`: by video, the quality that counts as none of the
    target's."""
    zero, intervals = float(zeros.mean()), share_intervals(found, zeros)
    base = statistics.mean(costs.predict_seconds(run, False) for run in found[0].runs)
    low, high = (statistics.mean(point.quality) for point in (found[1], found[0]))
    table = []
    for point, interval in zip(found, intervals, strict=True):
        modelled = statistics.mean(costs.predict_seconds(run, point.method.policy.needs_scores) for run in point.runs)
        table.append({
            "policy": point.policy,
            "setting": point.setting,
            "seconds": statistics.median(run.seconds for run in point.runs),
            "modelled": modelled,
            "speedup": base / modelled,
            "acceptance": mean_acceptance(point.runs),
            "quality": statistics.mean(point.quality),
            "retained": (statistics.mean(point.quality) - low) / (high - low),
            "of_target": (statistics.mean(point.quality) - zero) / (high - zero),
            "of_target_interval": interval,
            "predicted_over_measured": statistics.median(
                own.predict_seconds(run, point.method.policy.needs_scores) / run.seconds
                for own, run in zip(each, point.runs, strict=True)
            ),
        })  # fmt: skip
    return table


def at_equal_time(table: list[dict], policy: str, speedup: float, kind: str = "retained") -> float | None:
    """Retained quality of a policy at a speedup, between its settings; None outside of their range."""
    line = sorted((row["speedup"], row[kind]) for row in table if row["policy"] in (policy, "target", "draft"))
    own = [row["speedup"] for row in table if row["policy"] == policy]
    if not own or not min(own) <= speedup <= max(own):
        return None
    return float(np.interp(speedup, [x for x, _ in line], [y for _, y in line]))


def report(table: list[dict], costs: BlockCosts, about: dict) -> str:
    """The tables as Markdown."""
    policies = [name for name in dict.fromkeys(row["policy"] for row in table) if name not in ("target", "draft")]
    head = "| policy | " + " | ".join(f"{speedup:g}x" for speedup in SPEEDUPS) + " |\n|---|" + "---|" * len(SPEEDUPS)
    equal = [[at_equal_time(table, name, speedup) for speedup in SPEEDUPS] for name in policies]
    lines = [f"| {name} | " + " | ".join("" if v is None else f"{100 * v:.0f} %" for v in values) + " |"
             for name, values in zip(policies, equal, strict=True)]  # fmt: skip
    shares = ""
    if about["published"]:  # of the target's score, if the drafter's is the published share of it
        told = [[None if v is None else PUBLISHED_DRAFTER + (1 - PUBLISHED_DRAFTER) * v for v in values] for values in equal]
        said = [f"| {name} | " + " | ".join("" if v is None else f"{100 * v:.1f} %" for v in values) + " |"
                for name, values in zip(policies, told, strict=True)]  # fmt: skip
        shares = (
            f"\nThe same as a share of the target's score, where the drafter's is {PUBLISHED_DRAFTER:.1%}, as published "
            f"(98.1 % at 1.59x, about 95.7 % at 2.09x):\n\n{head}\n" + "\n".join(said) + "\n"
        )
    elif about["zero"] is not None:
        told = [[at_equal_time(table, name, speedup, "of_target") for speedup in SPEEDUPS] for name in policies]
        said = [f"| {name} | " + " | ".join("" if v is None else f"{100 * v:.1f} %" for v in values) + " |"
                for name, values in zip(policies, told, strict=True)]  # fmt: skip
        shares = (
            f"\nThe same as a share of the target's score (0 %: {about['zero']:.2f}, its videos under another caption; the "
            f"drafter's is {table[1]['of_target']:.1%}):\n\n{head}\n" + "\n".join(said) + "\n"
        )
    full = [
        f"| {row['policy']} {row['setting']} | {row['seconds']:.3f} | {row['modelled']:.3f} "
        f"| {row['predicted_over_measured']:.2f} | {row['speedup']:.2f} "
        f"| {'' if row['acceptance'] is None else format(row['acceptance'], '.2f')} | {row['quality']:.4f} "
        f"| {100 * row['retained']:.0f} % "
        f"| {100 * row['of_target']:.1f} ({' to '.join(f'{100 * end:.1f}' for end in row['of_target_interval'])}) |"
        for row in table
    ]
    parts = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in vars(costs).items() if value is not None)
    machine = about["machine"]
    return f"""# Video: policies at equal time, {about["pair"]}

{machine["cpu"]}, {machine["threads"]} threads, load {machine["load"]:.1f}, torch {machine["torch"]};
seconds of the processor; {about["videos"]} videos of {about["blocks"]} blocks. Command: `{about["command"]}`.

Milliseconds of a block: {parts}. Break-even acceptance {100 * costs.break_even_acceptance(4):.0f} %.

Quality kept (0 %: the drafter's, 100 %: the target's) at equal time by the cost model, between settings of each policy:

{head}
{chr(10).join(lines)}
{shares}
All settings. Modelled: by the cost model, from passes and verdicts; p/m: the median of modelled over measured seconds of a
video; of target: the share of the target's score in percent, with 95 % intervals over videos.

| policy, setting | s/video, median | modelled | p/m | speedup | accepted | quality | kept | of target |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(full)}
"""


def plot(table: list[dict], path: Path) -> None:
    """Quality against speedup, a line for each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for policy in dict.fromkeys(row["policy"] for row in table):
        line = sorted((row["speedup"], 100 * row["retained"]) for row in table if row["policy"] == policy)
        axis.plot([x for x, _ in line], [y for _, y in line], "o-" if len(line) > 1 else "s", label=policy, markersize=4)
    axis.set(xlabel="speedup over the target alone (cost model)", ylabel="quality kept, %")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", required=True, help="files to write, without suffix")
    parser.add_argument("--model", help="a packaged pair, instead of the synthetic one")
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--videos", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--published", action="store_true", help="a synthetic pair of the published one's costs and quality")
    parser.add_argument(
        "--router", type=float, metavar="R", help="a router of the synthetic pair that finds errors with this correlation"
    )
    parser.add_argument("--preview", action="store_true", help="score on cheap previews")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[-4, -2, -1, 0, 1, 2], help="of a packaged pair")
    parser.add_argument("--policies", nargs="+", help="beside target, draft, and threshold; default: all")
    parser.add_argument("--frames", type=int, help="of a block of a packaged pair that the scorer sees; default: all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    Clock.timer = staticmethod(time.process_time)  # what other programs take does not count
    if given.model:
        prompts = [line for line in given.prompt_file.read_text("utf-8").splitlines() if line.strip()]
        own = Packaged(given.model, prompts, given.blocks, given.preview, given.frames)
        run: Runner = own
        found = points(given.thresholds, [0.25, 0.5, 1, 2])
        found += packaged_points(own.pipe.router is not None, len(own.pipe.decoding_model().levels))
    else:
        thresholds, deltas = [-0.6, -0.45, -0.3, -0.2, -0.14, -0.1], [0.1, 0.15, 0.25, 0.4, 0.6]
        work = PUBLISHED if given.published else Work()
        run, found = synthetic(work, given.preview, given.blocks, given.router), points(thresholds, deltas)
        found += learned_points() if given.router is not None else []
    if given.policies:
        found = [point for point in found if point.policy in ("target", "draft", "threshold", *given.policies)]
    each = measured(found, run, given.videos)
    costs = median_costs(each)
    if given.model:
        zeros = np.array([own.strangers[seed] for seed in range(given.videos)])
    else:  # where the drafter's share of the target's quality is the published one, or none
        target, draft = (np.array(point.quality) for point in found[:2])
        zeros = target - (target - draft) / ((1 - PUBLISHED_DRAFTER) if given.published else 1)
    table = rows(found, costs, each, zeros)
    words = ["python benchmarks/video.py", *([f"--model {given.model}"] * bool(given.model))]
    words += ["--published"] * given.published + ["--preview"] * given.preview
    words += [] if given.router is None else [f"--router {given.router:g}"]
    words += [f"--frames {given.frames}"] * (given.frames is not None)
    words += [f"--thresholds {' '.join(f'{each:g}' for each in given.thresholds)}"] * bool(given.model)
    words += [f"--policies {' '.join(map(repr, given.policies))}"] if given.policies else []
    pair = (given.model or "synthetic pair" + ", published costs" * given.published) + ", cheap previews" * given.preview
    pair += "" if given.router is None else f", router with correlation {given.router:g}"
    pair += f", {given.frames} of a block's frames scored" * (given.frames is not None)
    about = {
        "pair": pair, "published": given.published, "zero": float(zeros.mean()) if given.model else None,
        "machine": describe_machine(), "videos": given.videos, "blocks": given.blocks,
        "command": " ".join([*words, f"--videos {given.videos} --blocks {given.blocks} --output ..."]),
    }  # fmt: skip
    output = Path(given.output)
    output.with_suffix(".json").write_text(json.dumps({"about": about, "costs": vars(costs), "rows": table}, indent=1) + "\n")
    output.with_suffix(".md").write_text(report(table, costs, about))
    plot(table, output.with_suffix(".png"))
    print(output.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()

"""Routing of a video pair at equal time: learned, scored and blind policies, early exits, and oracles that see both blocks.

    OMP_NUM_THREADS=1 python benchmarks/video_routing.py --output benchmarks/video_routing_NAME_DATE --trees FOLDER

For each prompt, the trees of all routed videos are generated and scored once (`vargen.pipelines.routing_tree`) and stored in
FOLDER, so that a killed run continues. Every policy at every setting is then one path through a tree. Seconds are those of the
cost model, whose parts are measured in this run. A router never sees the prompt that it routes: it is fitted to other folds.
Writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vargen.decoding import (
    PRESETS,
    QuantileThreshold,
    RandomShare,
    RelativeThreshold,
    Stride,
)
from vargen.decoding.harness import Clock
from vargen.decoding.seeds import resolve_seeds
from vargen.decoding.video.policies import Policy, PolicyState
from vargen.decoding.video.stats import BlockCosts, BlockRecord, estimate_block_costs
from vargen.device import describe_machine
from vargen.models.block_router import BlockRouter, describe_draft
from vargen.pipelines.registry import open_pipeline
from vargen.pipelines.routing_tree import build_routing_tree, score_tree
from vargen.scoring.frames import FrameScorer
from vargen.scoring.protocol import score_images
from vargen.training.router import RouterConfig, RouterPairs, fit_router

SPEEDUPS = (1.3, 1.6, 1.9, 2.1)
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FOLDS, RESAMPLES, CHANCES = 8, 2000, 16
RIDGE = RouterConfig().ridge


@dataclass
class Tree:
    """Scores of the tree of a prompt, by block and history, and statistics of its drafts from block 1 on.

    Attributes:
        first: routing score of block 0. stranger: mean score of the target's video under the next prompt.
    """

    target: list[np.ndarray]
    draft: list[np.ndarray]
    routing: list[np.ndarray]
    statistics: list[np.ndarray]
    first: float
    stranger: float

    @property
    def blocks(self) -> int:
        return len(self.target)

    def later_gains(self) -> list[np.ndarray]:
        """The target's gain over a draft, with that of later blocks if their sources are chosen at random."""
        found: list[np.ndarray] = []
        value = None
        for own, drafted in list(zip(self.target, self.draft, strict=True))[:0:-1]:
            with_target = own + (0 if value is None else value[0::2])
            with_draft = drafted + (0 if value is None else value[1::2])
            found.insert(0, with_target - with_draft)
            value = (with_target + with_draft) / 2
        return found


@torch.no_grad()
def load_tree(pipe: Any, prompts: list[str], number: int, blocks: int, exit_step: int, folder: Path) -> Tree:
    """The tree of a prompt, generated if it is not stored."""
    path = folder / f"{exit_step}-{blocks}-{number}.npz"
    names = ("target", "draft", "routing")
    if not path.is_file():
        prompt, model = prompts[number], pipe.decoding_model()
        seed = int(resolve_seeds(torch.Generator().manual_seed(number), 1).noise_seeds[0])
        tree = build_routing_tree(model, pipe.encode_video_condition(prompt), seed, blocks, exit_step or None)
        judge = FrameScorer(pipe.resolve_frame_scorer().scorer, frames=1)
        with torch.autocast("cpu", torch.bfloat16):  # the scorer and the decoder only
            scores, first = score_tree(pipe, tree, prompt, judge, every=2)
            frames = (pipe.vae.decode(torch.cat([block.target[:1] for block in tree], 1))[0] / 2 + 0.5).clamp(0, 1)
        other = pipe.scorer_prompt(prompts[(number + 1) % len(prompts)])
        stored: dict[str, Any] = {
            "first": first,
            "stranger": float(score_images(judge.scorer, frames, [other] * len(frames)).mean()),
        }
        for n, (block, score) in enumerate(zip(tree, scores, strict=True)):
            stored |= {f"{name}{n}": getattr(score, name) for name in names}
            if block.previous is not None:
                first_block = tree[0].target.expand_as(block.draft)
                stored[f"statistics{n}"] = describe_draft(block.draft, block.previous, first_block, n).numpy()
        np.savez(path, **stored)
    with np.load(path) as file:
        parts = [[file[f"{name}{n}"] for n in range(blocks)] for name in names]
        return Tree(*parts, [file[f"statistics{n}"] for n in range(1, blocks)], float(file["first"]), float(file["stranger"]))


# -- routes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """A path through a tree: the mean score of its blocks, and its seconds."""

    quality: float
    seconds: float


@dataclass(frozen=True)
class Prices:
    """Seconds: of the parts of a block, and of ranking a draft. steps: of both models. exit_step: 0 if a small model drafts."""

    block: BlockCosts
    rank: float
    steps: int
    exit_step: int = 0

    def seconds(self, drafted: Sequence[bool], accepted: Sequence[bool], ranked: bool, scored: bool) -> float:
        """Seconds of a video, by block. Caches are updated lazily, as in `BlockGenerator`."""
        cost, total = self.block, len(drafted) * self.block.decode
        total += scored * len(drafted) * (cost.preview or 0.0)
        waiting_target = waiting_draft = 0
        for tried, taken in zip(drafted, accepted, strict=True):
            if tried and not self.exit_step:
                total += (waiting_draft + self.steps) * cost.draft
                waiting_draft = 0
            if self.exit_step or not taken:
                total += (waiting_target + (self.exit_step if taken else self.steps)) * cost.target
                waiting_target = 0
            total += tried * (ranked * self.rank + scored * cost.score)
            waiting_target, waiting_draft = waiting_target + 1, waiting_draft + 1
        return total


Scores = Callable[[Tree, int, int], float]  # of the draft of a block after a history; higher is better


def walk(tree: Tree, state: PolicyState, score: Scores | None, prices: Prices, ranked: bool) -> Route:
    """Route a video by a policy."""
    row, qualities, drafted, accepted = 0, [], [], []
    for n in range(tree.blocks):
        tried = n > 0 and state.should_draft(n)
        value = score(tree, n, row) if tried and score is not None else None
        taken = tried and state.should_accept(n, value)
        outcome = "forced" if not tried else "accepted" if taken else "rejected"
        state.observe(BlockRecord(n, 0, outcome=outcome, score=tree.first if n == 0 else value))  # type: ignore[arg-type]
        qualities.append((tree.draft if taken else tree.target)[n][row])
        drafted.append(tried)
        accepted.append(taken)
        row = 2 * row + taken if n else 0
    scored = score is not None and not ranked
    return Route(float(np.mean(qualities)), prices.seconds(drafted, accepted, ranked, scored))


def best_routes(trees: Sequence[Tree], prices: Prices) -> list[list[Route]]:
    """For a range of prices of a second, the best of all paths of each tree: what no router can exceed at that time."""
    every = []
    for tree in trees:
        routes = []
        for choices in product((False, True), repeat=tree.blocks - 1):
            taken, row, qualities = [False, *choices], 0, []
            for n, choice in enumerate(taken):
                qualities.append((tree.draft if choice else tree.target)[n][row])
                row = 2 * row + choice if n else 0
            routes.append(Route(float(np.mean(qualities)), prices.seconds(taken, taken, False, False)))
        every.append(routes)
    return [
        [max(routes, key=lambda r: r.quality - p * r.seconds) for routes in every] for p in (0, *np.geomspace(0.05, 200, 40))
    ]


def fitted_scores(trees: Sequence[Tree], more: Sequence[Tree], labels: Callable[[Tree], list[np.ndarray]]) -> Scores:
    """Negative gains predicted by routers, each fitted to `more` trees and to these, without the fold of the tree."""

    def pairs_of(tree: Tree) -> RouterPairs:
        return RouterPairs(np.concatenate(tree.statistics), np.concatenate(labels(tree)).astype(np.float32))

    pairs, given = [pairs_of(tree) for tree in trees], [pairs_of(tree) for tree in more]
    found: dict[int, list[np.ndarray]] = {}
    for fold in range(FOLDS):
        router = BlockRouter()
        fit_router(router, [*given, *(each for i, each in enumerate(pairs) if i % FOLDS != fold)], RIDGE)
        with torch.no_grad():
            for tree in trees[fold::FOLDS]:
                found[id(tree)] = [-router.predict_gain(torch.from_numpy(each)).numpy() for each in tree.statistics]
    return lambda tree, n, row: float(found[id(tree)][n - 1][row])


Policies = dict[str, list[list[Route]]]  # by name, for each setting, the route of each prompt


def routes_of(trees: Sequence[Tree], more: Sequence[Tree], prices: Prices) -> Policies:
    """The routes of all policies on these trees; routers are also fitted to `more` trees."""

    def table(score: Scores) -> np.ndarray:
        return np.array([score(t, n, row) for t in trees for n in range(1, t.blocks) for row in range(len(t.target[n]))])

    def cuts(score: Scores, ranked: bool) -> list[list[Route]]:
        edges = [np.inf, *np.quantile(table(score), [1 - share for share in SHARES[1:]])]
        return [[walk(t, PolicyState(edge), score, prices, ranked) for t in trees] for edge in edges]

    def policy(kind: Policy, score: Scores | None = None) -> list[Route]:
        return [walk(t, kind.start(i), score, prices, False) for i, t in enumerate(trees)]

    def seen(tree: Tree, n: int, row: int) -> float:
        return float(tree.routing[n][row])

    offsets = [np.mean([t.routing[n].mean() - t.first for t in trees]) for n in range(trees[0].blocks)]
    learned = fitted_scores(trees, more, lambda t: [a - b for a, b in zip(t.target[1:], t.draft[1:], strict=True)])
    later = fitted_scores(trees, more, Tree.later_gains)
    found: Policies = {
        "learned": cuts(learned, True),
        "learned, later blocks": cuts(later, True),
        "stride": [policy(Stride(every)) for every in (1, 2, 3, 4, 5, 6)],
        "chance": [],
    }
    for share in SHARES:
        several = [[walk(t, RandomShare(share).start(1000 * k + i), None, prices, False) for k in range(CHANCES)]
                   for i, t in enumerate(trees)]  # fmt: skip
        found["chance"].append([Route(np.mean([r.quality for r in s]), np.mean([r.seconds for r in s])) for s in several])
    if not prices.exit_step:
        found["threshold"] = cuts(seen, False)
        found["relative to block 0"] = [policy(RelativeThreshold(delta), seen) for delta in (-2, -1, -0.5, 0, 0.5, 1, 2, 4)]
        found["relative to block 0 and position"] = cuts(
            lambda t, n, row: float(t.routing[n][row] - t.first - offsets[n]), False
        )
        found["quantile"] = [policy(QuantileThreshold(1 - share), seen) for share in SHARES]
    gain: Scores = lambda t, n, row: float(t.draft[n][row] - t.target[n][row])  # noqa: E731
    free = replace(prices, rank=0.0)
    edges = np.quantile(table(gain), [1 - share for share in SHARES])
    found["oracle, next block"] = [[walk(t, PolicyState(edge), gain, free, True) for t in trees] for edge in edges]
    found["oracle, whole video"] = best_routes(trees, free)
    return found


# -- at equal time ---------------------------------------------------------------------------------------------------------


def compare(policies: Policies, base: list[Route], zero: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Shares of each policy, with 95 % intervals over prompts, and differences from stride on the same prompts."""
    random, count = np.random.default_rng(seed), len(base)
    samples = [np.arange(count), *(random.integers(count, size=count) for _ in range(RESAMPLES))]
    arrays = {name: (np.array([[r.seconds for r in s] for s in settings]), np.array([[r.quality for r in s] for s in settings]))
              for name, settings in policies.items()}  # fmt: skip
    bs, bq = np.array([r.seconds for r in base]), np.array([r.quality for r in base])

    def curve(name: str, chosen: np.ndarray) -> np.ndarray:
        seconds, quality = (each[:, chosen].mean(1) for each in arrays[name])
        none, full = zero[chosen].mean(), bq[chosen].mean()
        speed = bs[chosen].mean() / seconds
        order = np.argsort(speed)
        return np.interp(SPEEDUPS, speed[order], ((quality - none) / (full - none))[order], left=np.nan, right=np.nan)

    curves = {name: np.array([curve(name, chosen) for chosen in samples]) for name in policies}

    def summary(values: np.ndarray) -> list[list[float] | None]:
        found: list[list[float] | None] = []
        for column in values.T:
            usual = column[1:][np.isfinite(column[1:])]
            outside = not np.isfinite(column[0]) or len(usual) < 0.9 * RESAMPLES
            found.append(None if outside else [float(column[0]), *map(float, np.quantile(usual, (0.025, 0.975)))])
        return found

    return {
        name: {"share": summary(values), "minus_stride": summary(values - curves["stride"])} for name, values in curves.items()
    }


def measure_prices(pipe: Any, prompts: list[str], blocks: int) -> tuple[BlockCosts, float]:
    """Seconds of the processor: of the parts of a block in generated videos, and of ranking a draft."""
    runs: dict[str, list[Any]] = {"target": [], "draft": [], "rejecting": []}
    methods = {"target": PRESETS["target"], "draft": PRESETS["draft"], "rejecting": PRESETS["sdvg"].with_tau(1e6)}
    judge = FrameScorer(pipe.resolve_frame_scorer().scorer, frames=1)
    for number, prompt in enumerate(prompts):
        for name, method in methods.items():
            given = {"scorer": judge} if method.needs_scorer else {}
            source = torch.Generator().manual_seed(number)
            stream = pipe.stream(prompt, accelerator=method, num_blocks=blocks, generator=source, **given)
            list(stream)
            runs[name].append(stream.stats)
    router, draft = BlockRouter(), torch.randn(1, *pipe.decoding_model().block_shape)
    with torch.no_grad():
        router(draft, draft, draft, 1)
        start = time.process_time()
        for _ in range(100):
            router(draft, draft, draft, 1)
    return estimate_block_costs(runs["target"], runs["draft"], runs["rejecting"]), (time.process_time() - start) / 100


def report(found: dict[str, Any]) -> str:
    """The tables as Markdown."""
    about, lines = found["about"], []
    for name, result in found["drafts"].items():
        lines.append(f"## {name}\n")
        for key, title in (
            ("share", "Share of the target's score, %"),
            ("minus_stride", "Difference from stride, percentage points"),
        ):
            lines += [f"{title}, with 95 % intervals over prompts:\n", "| | " + " | ".join(f"{x:g}x" for x in SPEEDUPS) + " |"]
            lines.append("|---" * (len(SPEEDUPS) + 1) + "|")
            for policy, values in result.items():
                if key == "minus_stride" and policy == "stride":
                    continue
                told = ["" if v is None else f"{100 * v[0]:.1f} ({100 * v[1]:.1f} to {100 * v[2]:.1f})" for v in values[key]]
                lines.append(f"| {policy} | " + " | ".join(told) + " |")
            lines.append("")
    machine, costs = about["machine"], about["costs"]
    parts = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in costs.items() if value is not None)
    return f"""# Video: routing at equal time, {about["model"]}

{machine["cpu"]}, {machine["threads"]} threads, load {machine["load"]:.1f}, torch {machine["torch"]}; seconds of the processor;
{about["prompts"]} prompts (and {about["router_prompts"]} to fit routers to), videos of {about["blocks"]} blocks.
Command: `{about["command"]}`.

Milliseconds of a block: {parts}. Empty: outside of a policy's settings.

""" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", required=True, help="files to write, without suffix")
    parser.add_argument("--trees", type=Path, required=True, help="folder for the trees, which a later run continues")
    parser.add_argument("--model", default="emoji-video")
    parser.add_argument("--prompt-file", type=Path, default=Path(__file__).parent / "video_prompts.txt")
    parser.add_argument("--router-prompts", type=Path, help="further prompts, to fit the router to")
    parser.add_argument("--prompts", type=int, default=64, help="use the first N")
    parser.add_argument("--blocks", type=int, default=6, help="of a video; each block more doubles the work")
    parser.add_argument("--exit-steps", type=int, nargs="*", default=[1], help="early exits to measure")
    given = parser.parse_args()
    torch.set_num_threads(1)
    Clock.timer = staticmethod(time.process_time)  # what other programs take does not count
    prompts = [line for line in given.prompt_file.read_text("utf-8").splitlines() if line.strip()]
    others = [] if given.router_prompts is None else given.router_prompts.read_text("utf-8").split("\n")
    others = [line for line in others if line.strip()]
    more_trees = given.trees / "router"
    more_trees.mkdir(parents=True, exist_ok=True)
    pipe = open_pipeline(given.model)
    costs, rank = measure_prices(pipe, prompts[:4], given.blocks)
    steps, found = len(pipe.decoding_model().levels), {}
    for exit_step in (0, *given.exit_steps):
        name = f"drafts: the target's estimate after step {exit_step} of {steps}" if exit_step else "drafts of the small model"
        trees = [load_tree(pipe, prompts, i, given.blocks, exit_step, given.trees) for i in range(given.prompts)]
        prices = Prices(costs, rank, steps, exit_step)
        more = [] if exit_step else [load_tree(pipe, others, i, given.blocks, 0, more_trees) for i in range(len(others))]
        policies = routes_of(trees, more, prices)
        base = policies["stride"][0]  # every block by the target
        found[name] = compare(policies, base, np.array([tree.stranger for tree in trees]))
    words = ["python benchmarks/video_routing.py", f"--prompts {given.prompts}", f"--blocks {given.blocks}"]
    words += [f"--router-prompts benchmarks/{given.router_prompts.name}"] * (given.router_prompts is not None)
    words += ["--exit-steps " + " ".join(map(str, given.exit_steps)), "--output ... --trees ..."]
    about = {
        "model": given.model, "machine": describe_machine(), "prompts": given.prompts, "router_prompts": len(others),
        "blocks": given.blocks,
        "command": " ".join(words), "costs": {**vars(costs), "rank": rank},
    }  # fmt: skip
    result = {"about": about, "drafts": found}
    output = Path(given.output)
    output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    output.with_suffix(".md").write_text(report(result), "utf-8")


if __name__ == "__main__":
    main()

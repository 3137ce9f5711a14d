"""Routing of a video pair at equal time: learned, scored and blind policies, early exits, and oracles that see both blocks.

    OMP_NUM_THREADS=1 python benchmarks/video_routing.py --output benchmarks/video_routing_NAME_DATE --trees FOLDER

For each prompt, the trees of all routed videos are generated and scored once (`vargen.training.routing_tree`) and stored in
FOLDER, so that a killed run continues. Every policy at every setting is then one path through a tree. Seconds are those of the
cost model, whose parts are measured in this run. A router never sees the video that it routes. "learned" is fitted to the same
prompts with other seeds, as a packaged router is; "learned, new prompts" to other prompts.
Writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from video_routes import Policies, Prices, Route, Tree, routes_of

from vargen.decoding import PRESETS
from vargen.decoding.harness import Clock
from vargen.decoding.seeds import resolve_seeds
from vargen.decoding.video.stats import BlockCosts, estimate_block_costs
from vargen.device import describe_machine
from vargen.models.block_router import BlockRouter, describe_draft
from vargen.pipelines.registry import open_pipeline
from vargen.scoring.frames import FrameScorer
from vargen.scoring.protocol import score_images
from vargen.training.routing_tree import build_routing_tree, score_tree

SPEEDUPS = (1.3, 1.6, 1.9, 2.1)
RESAMPLES = 2000


@torch.no_grad()
def load_tree(pipe: Any, prompts: list[str], number: int, start: int, blocks: int, exit_step: int, folder: Path) -> Tree:
    """The tree of a prompt, generated if it is not stored; prompt `number` has the seed `start + number`."""
    path = folder / f"{exit_step}-{blocks}-{start + number}.npz"
    names = ("target", "draft", "routing")
    if not path.is_file():
        prompt, model = prompts[number], pipe.decoding_model()
        seed = int(resolve_seeds(torch.Generator().manual_seed(start + number), 1).noise_seeds[0])
        tree = build_routing_tree(model, pipe.encode_video_condition(prompt), seed, blocks, exit_step or None)
        frame_scorer = FrameScorer(pipe.resolve_frame_scorer().scorer, frames=1)
        scores, first = score_tree(pipe, tree, prompt, frame_scorer, every=2)
        frames = (pipe.vae.decode(torch.cat([block.target[:1] for block in tree], 1))[0] / 2 + 0.5).clamp(0, 1)
        other = pipe.scorer_prompt(prompts[(number + 1) % len(prompts)])
        stranger = float(score_images(frame_scorer.scorer, frames, [other] * len(frames)).mean())
        stored: dict[str, Any] = {"first": first, "stranger": stranger}
        for n, (block, score) in enumerate(zip(tree, scores, strict=True)):
            stored |= {f"{name}{n}": getattr(score, name) for name in names}
            if block.previous is not None:
                first_block = tree[0].target.expand_as(block.draft)
                stored[f"statistics{n}"] = describe_draft(block.draft, block.previous, first_block, n).numpy()
        np.savez(path, **stored)
    with np.load(path) as file:
        parts = [[file[f"{name}{n}"] for n in range(blocks)] for name in names]
        return Tree(*parts, [file[f"statistics{n}"] for n in range(1, blocks)], float(file["first"]), float(file["stranger"]))


# -- at equal time ---------------------------------------------------------------------------------------------------------


def compare(policies: Policies, base: list[Route], zero: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Shares of each policy, with 95 % intervals over prompts, differences from stride, and all settings (speedup, share)."""
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

    stride = curves["stride"]
    found: dict[str, Any] = {}
    for name, (seconds, quality) in arrays.items():
        shares = (quality.mean(1) - zero.mean()) / (bq.mean() - zero.mean())
        settings = np.stack([bs.mean() / seconds.mean(1), shares], 1).tolist()
        difference = summary(curves[name] - stride)
        found[name] = {"share": summary(curves[name]), "minus_stride": difference, "settings": settings}
    return found


def measure_prices(pipe: Any, prompts: list[str], blocks: int) -> tuple[BlockCosts, float]:
    """Seconds of the processor: of the parts of a block in generated videos, and of ranking a draft."""
    runs: dict[str, list[Any]] = {"target": [], "draft": [], "rejecting": []}
    methods = {"target": PRESETS["target"], "draft": PRESETS["draft"], "rejecting": PRESETS["sdvg"].with_tau(1e6)}
    frame_scorer = FrameScorer(pipe.resolve_frame_scorer().scorer, frames=1)
    for number, prompt in enumerate(prompts):
        for name, method in methods.items():
            given = {"scorer": frame_scorer} if method.needs_scorer else {}
            source = torch.Generator().manual_seed(number)
            stream = pipe.stream(prompt, accelerator=method, num_blocks=blocks, generator=source, run_ahead=False, **given)
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
    titles = {"share": "Share of the target's score, %", "minus_stride": "Difference from stride, percentage points"}
    for key, title in titles.items():
        lines += [f"{title}, with 95 % intervals over prompts:\n", "| | " + " | ".join(f"{x:g}x" for x in SPEEDUPS) + " |"]
        lines.append("|---" * (len(SPEEDUPS) + 1) + "|")
        for policy, values in found["policies"].items():
            if (key, policy) != ("minus_stride", "stride"):
                told = ["" if v is None else f"{100 * v[0]:.1f} ({100 * v[1]:.1f} to {100 * v[2]:.1f})" for v in values[key]]
                lines.append(f"| {policy} | " + " | ".join(told) + " |")
        lines.append("")
    lines += ["Settings of stride, speedup: share of the target's score, %:\n"]
    for policy in ("stride", *(name for name in found["policies"] if name.endswith(", stride"))):
        points = ", ".join(f"{x:.2f}x: {100 * y:.1f}" for x, y in found["policies"][policy]["settings"])
        lines.append(f"- {policy}: {points}")
    machine, costs = about["machine"], about["costs"]
    parts = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in costs.items() if value is not None)
    return (
        f"""# Video: routing at equal time, {about["model"]}

{machine["cpu"]}, {machine["threads"]} threads, load {machine["load"]:.1f}, torch {machine["torch"]}; seconds of the processor;
{about["prompts"]} prompts with {len(about["seeds"])} seeds, videos of {about["blocks"]} blocks.
Command: `{about["command"]}`.

Milliseconds of a block: {parts}.

Empty: outside of a policy's settings. Stride: the target for every n-th block. Learned: routers fitted to videos of the same
prompts with other seeds, or to videos of other prompts.
Relative: to the score of the target's block 0. Oracles know the scores of both blocks: of the next one, or of all videos that
routing can make.

"""
        + "\n".join(lines)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", required=True, help="files to write, without suffix")
    parser.add_argument("--trees", type=Path, required=True, help="folder for the trees, which a later run continues")
    parser.add_argument("--model", default="emoji-video")
    parser.add_argument("--prompt-file", type=Path, default=Path(__file__).parent / "video_prompts.txt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of prompt 0 in each round over the prompts")
    parser.add_argument("--prompts", type=int, default=64, help="use the first N")
    parser.add_argument("--blocks", type=int, default=6, help="of a video; each block more doubles the work")
    parser.add_argument("--exit-steps", type=int, nargs="*", default=[1], help="early exits to measure")
    given = parser.parse_args()
    torch.set_num_threads(1)
    Clock.timer = staticmethod(time.process_time)  # what other programs take does not count
    prompts = [line for line in given.prompt_file.read_text("utf-8").splitlines() if line.strip()]
    given.trees.mkdir(parents=True, exist_ok=True)
    pipe = open_pipeline(given.model)
    costs, rank = measure_prices(pipe, prompts[:4], given.blocks)
    steps, policies = len(pipe.decoding_model().levels), {}
    for exit_step in (0, *given.exit_steps):
        rounds = [
            [load_tree(pipe, prompts, i, seed, given.blocks, exit_step, given.trees) for i in range(given.prompts)]
            for seed in given.seeds
        ]
        routes = routes_of(rounds, Prices(costs, rank, steps, exit_step))
        policies |= {f"exit after step {exit_step}, {name}" if exit_step else name: each for name, each in routes.items()}
        if not exit_step:
            zero = np.mean([[tree.stranger for tree in trees] for trees in rounds], axis=0)
    found = compare(policies, policies["stride"][0], zero)
    words = ["python benchmarks/video_routing.py", f"--prompts {given.prompts}", f"--blocks {given.blocks}"]
    words.append("--seeds " + " ".join(map(str, given.seeds)))
    words += [" ".join(map(str, ["--exit-steps", *given.exit_steps])), "--output ... --trees ..."]
    about = {
        "model": given.model, "machine": describe_machine(), "prompts": given.prompts,
        "blocks": given.blocks, "seeds": given.seeds,
        "command": " ".join(words), "costs": {**vars(costs), "rank": rank},
    }  # fmt: skip
    result = {"about": about, "policies": found}
    output = Path(given.output)
    output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    output.with_suffix(".md").write_text(report(result), "utf-8")


if __name__ == "__main__":
    main()

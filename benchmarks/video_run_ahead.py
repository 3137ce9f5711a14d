"""Seconds of a video with and without running ahead, on two cores with a thread each.

    OMP_NUM_THREADS=1 taskset -c 0,1 python benchmarks/video_run_ahead.py --output benchmarks/video_run_ahead_NAME_DATE

The two take turns, in both orders, so that other work slows them alike. Writes OUTPUT.json and OUTPUT.md.

- Schedule: computed from the parts of a block in processor time, which other programs do not slow; see `scheduled_seconds`.
- Wall: ratio of the fastest runs. Pairs: median and quartiles of the ratios of neighboring runs.
- Processor: ratio of the processor times of both threads, with what is discarded.
- Hidden: seconds of passes that were not waited for, as a share of the wall-clock time. Discarded: share of the blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from vargen import open_pipeline
from vargen.decoding import VideoStats
from vargen.decoding.harness import Clock
from vargen.device import describe_machine, summarize_machine

METHODS: dict[str, dict[str, Any]] = {
    "sdvg, all drafts accepted": {"accelerator": "sdvg", "tau": float("-inf")},
    "sdvg": {"accelerator": "sdvg"},
    "sdvg, none accepted": {"accelerator": "sdvg", "tau": float("inf")},
    "stride": {"accelerator": "stride"},
    "early-exit": {"accelerator": "early-exit"},
    "draft": {"accelerator": "draft"},
    "target": {"accelerator": "target"},
}


def scheduled_seconds(stats: VideoStats) -> float:
    """Seconds of a video whose next block is generated on a second core, from the parts of a run on one.

    The passes of a block start when the block before it has the latents that turn out to be final and its own verification
    begins, and end before the verification of this block.
    """
    ready, done = 0.0, 0.0  # when the second core could start on the next block, and when the previous one was decoded
    for record in stats.blocks:
        part = {name: record.seconds_by_part.get(name, 0.0) for name in ("commit", "draft", "target", "score", "decode")}
        rejected = record.outcome == "rejected"
        generate = part["draft"] if rejected else part["draft"] + part["target"]
        latents = max(ready + part["commit"] + generate, done)
        ready = latents + (part["score"] + part["target"] if rejected else 0.0)
        done = latents + part["score"] + part["decode"] + (part["target"] if rejected else 0.0)
    return done


def run(pipe: Any, prompt: str, seed: int, blocks: int, options: dict[str, Any], ahead: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    stream = pipe.stream(prompt, num_blocks=blocks, generator=generator, run_ahead=ahead, **options)
    wall, processor = time.perf_counter(), time.process_time()
    last = [block.latents for block in stream][-1]
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return {"wall": wall, "processor": processor, "stats": stream.stats, "last": last}


def measure(pipe: Any, prompts: list[str], blocks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run every prompt with and without running ahead, and compare the last block bit for bit."""
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    scheduled = []
    for number, prompt in enumerate(prompts):
        pair = {}
        for ahead in (False, True) if number % 2 else (True, False):
            pair[ahead] = run(pipe, prompt, number, blocks, options, ahead)
            found[ahead].append(pair[ahead])
        if not torch.equal(pair[False]["last"], pair[True]["last"]):
            raise RuntimeError(f"{prompt!r}: the video changed")
        timer, Clock.timer = Clock.timer, staticmethod(time.thread_time)
        stats = run(pipe, prompt, number, blocks, options, False)["stats"]
        Clock.timer = timer
        scheduled.append(scheduled_seconds(stats) / stats.seconds)
    runs = {ahead: [each["stats"] for each in each_run] for ahead, each_run in found.items()}
    pairs = [a["wall"] / b["wall"] for a, b in zip(found[True], found[False], strict=True)]
    fastest = {ahead: min(each["wall"] for each in each_run) for ahead, each_run in found.items()}
    processor = {ahead: statistics.median(each["processor"] for each in each_run) for ahead, each_run in found.items()}
    ahead = runs[True]
    total = sum(stats.seconds for stats in ahead)
    return {
        "accepted": statistics.mean(stats.acceptance or 0.0 for stats in ahead),
        "milliseconds": 1000 * fastest[False] / blocks,
        "milliseconds_ahead": 1000 * fastest[True] / blocks,
        "wall": fastest[True] / fastest[False],
        "pairs": statistics.quantiles(pairs, n=4),
        "processor": processor[True] / processor[False],
        "hidden": sum(stats.seconds_hidden for stats in ahead) / total,
        "discarded": sum(stats.blocks_discarded for stats in ahead) / len(ahead) / blocks,
        "schedule": statistics.median(scheduled),
    }


def to_table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| method | accepted | schedule | ms a block | ahead | wall | pairs (quartiles) | processor | hidden | discarded |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        low, middle, high = row["pairs"]
        cells = [
            name, f"{row['accepted']:.0%}", f"{row['schedule']:.2f}", f"{row['milliseconds']:.1f}",
            f"{row['milliseconds_ahead']:.1f}", f"{row['wall']:.2f}", f"{middle:.2f} ({low:.2f} to {high:.2f})",
            f"{row['processor']:.2f}", f"{row['hidden']:.0%}", f"{row['discarded']:.0%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-video")
    parser.add_argument("--videos", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    pipe = open_pipeline(given.model)
    prompts = [
        line for line in Path(__file__).with_name("video_prompts.txt").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    prompts = (prompts * given.videos)[: given.videos]
    measure(pipe, prompts[:2], 2, METHODS["sdvg"])  # warm-up
    before = describe_machine()
    rows = {}
    for name, options in METHODS.items():
        rows[name] = measure(pipe, prompts, given.blocks, options)
        print(to_table(rows), flush=True)
    machine = {**before, "load_after": describe_machine()["load"]}
    given.output.with_suffix(".json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    head = summarize_machine(machine, torch.device("cpu"), pipe.dtype)
    command = (
        f"OMP_NUM_THREADS=1 python benchmarks/video_run_ahead.py --videos {given.videos} --blocks {given.blocks} --output ..."
    )
    note = f"{head}; {machine['cores']} cores, load {machine['load']:.1f} to {machine['load_after']:.1f}. Command: `{command}`."
    given.output.with_suffix(".md").write_text(f"# Video: running ahead, {given.model}\n\n{note}\n\n{to_table(rows)}")


if __name__ == "__main__":
    main()

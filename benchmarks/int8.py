"""8-bit integer products on a CPU: passes and images of float32 and int8 in one run, in turn, on one thread.

    python -m benchmarks.int8 --json benchmarks/int8_<hardware>_<date>.json

Times are the least of many, in processor time. Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vargen import open_pipeline
from vargen.decoding.harness import Clock
from vargen.device import describe_machine, limit_threads
from vargen.evaluation.networks import BenchmarkModel, open_benchmark_model
from vargen.evaluation.pass_parts import PARTS, measure_time_beside
from vargen.evaluation.speed import weight_readers
from vargen.kernels.cpu_code import TOKEN_PASS, TOKEN_STEPS, explain_int8_passes
from vargen.models.quantization import quantize_network
from vargen.scoring.protocol import score_images

WIDTHS = (1, 4, 8, 16)
PROMPTS, VIDEO_PROMPTS = (Path(__file__).with_name(f"{name}_prompts.txt") for name in ("eval", "video"))


def time_once(run: Callable[[], Any]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def quantized_copy(model: BenchmarkModel) -> BenchmarkModel:
    """The model with a quantized transformer."""
    pipe = copy.copy(model.pipe)
    pipe.__dict__["transformer"] = quantize_network(copy.deepcopy(model.transformer))
    return BenchmarkModel(f"{model.name}, int8", pipe)


@torch.inference_mode()
def measure_passes(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of guided passes of each kind by width, and of reading the int8 weights once."""
    model = open_benchmark_model(name, torch.float32, torch.device("cpu"))
    compiled, operators = quantized_copy(model), quantized_copy(model)
    kinds = {"float32": model.passes(2, WIDTHS), "int8, compiled": compiled.passes(2, WIDTHS)}
    before = os.environ.get("VARGEN_KERNELS")
    os.environ["VARGEN_KERNELS"] = "reference"
    kinds["int8, operators"] = operators.passes(2, WIDTHS)
    os.environ.pop("VARGEN_KERNELS") if before is None else os.environ.update(VARGEN_KERNELS=before)
    readers = weight_readers(compiled.weight_bytes, torch.device("cpu"))
    best: dict[tuple[str, int], float] = {}
    read = float("inf")
    for _ in range(rounds):
        read = min(read, *(time_once(reader) for reader in readers))
        for kind, passes in kinds.items():
            for width, run in passes.items():
                run()
                best[kind, width] = min([best.get((kind, width), float("inf")), *(time_once(run) for _ in range(3))])
    parts = {}
    for width, run in kinds["int8, compiled"].items():
        ticks = compiled.pass_buffers(2, width).ticks
        start = ticks.copy()
        for _ in range(20):
            run()
        spent = (ticks - start).tolist()
        parts[width] = dict(zip(PARTS, (each / sum(spent) for each in spent), strict=True))
    return {
        "milliseconds": {kind: {width: 1e3 * best[kind, width] for width in WIDTHS} for kind in kinds},
        "shares_of_compiled": parts,
        "int8_megabytes": compiled.weight_bytes / 1e6,
        "read_milliseconds": 1e3 * read,
        "beside_milliseconds": measure_time_beside(compiled, [1])[1] if name == "emoji" else None,
    }


def measure_images(images: int, timed: int) -> dict[str, Any]:
    """Seconds of an image of `emoji` by method and format, in turn, and how many int8 images equal those of `ar`."""
    prompts = [line for line in PROMPTS.read_text("utf-8").splitlines() if line.strip() and line[0] != "#"][:images]
    pipes = {"float32": open_pipeline("emoji", torch_dtype=torch.float32), "int8": open_pipeline("emoji", quantization="int8")}
    for pipe in pipes.values():
        pipe.set_progress_bar_config(disable=True)
    cases = [("float32", "ar"), ("float32", "gumbel"), ("int8", "ar"), ("int8", "gumbel"), ("int8", "auto"), ("int8", "mulo")]
    seconds: dict[str, list[float]] = {}
    same = dict.fromkeys(("gumbel", "auto"), 0)
    for number, prompt in enumerate(prompts):
        tokens = {}
        for kind, method in cases:
            if number >= timed and (kind == "float32" or method == "mulo"):
                continue
            call = {"accelerator": method, "output_type": "latent", "generator": torch.Generator().manual_seed(number)}
            result = pipes[kind](prompt, **call)
            tokens[kind, method] = result.images
            if number < timed:
                seconds.setdefault(f"{kind}, {method}", []).append(result.stats.seconds)
        for method in same:
            same[method] += bool(torch.equal(tokens["int8", method], tokens["int8", "ar"]))
    return {
        "images": len(prompts),
        "same_as_ar": same,
        "mean_seconds": {name: sum(each) / len(each) for name, each in seconds.items()},
        "least_seconds": {name: min(each) for name, each in seconds.items()},
    }


@torch.inference_mode()
def measure_sizes(names: list[str]) -> dict[str, Any]:
    """Milliseconds of guided passes over 1 and 16 tokens in float32 and compiled int8, of one network in memory at a time."""
    found: dict[str, Any] = {}
    for name in names:
        model = open_benchmark_model(name, torch.float32, torch.device("cpu"))
        found[name] = {}
        for kind in ("float32", "int8"):
            if kind == "int8":
                quantize_network(model.transformer)
            passes = model.passes(2, (1, 16))
            for run in passes.values():
                run()
            found[name][kind] = {width: 1e3 * min(time_once(run) for _ in range(4)) for width, run in passes.items()}
    return found


def measure_clips(clips: int) -> dict[str, Any]:
    """Scores of clips of `emoji-video` in float32 and int8, and how much the pixels change between them."""
    prompts = [line for line in VIDEO_PROMPTS.read_text("utf-8").splitlines() if line.strip() and line[0] != "#"][:clips]
    pipes = {
        "float32": open_pipeline("emoji-video", torch_dtype=torch.float32),
        "int8": open_pipeline("emoji-video", quantization="int8"),
    }
    scorer, scores = pipes["float32"].resolve_frame_scorer(None).scorer, {kind: [] for kind in pipes}
    changes, motion = [], []
    for number, prompt in enumerate(prompts):
        frames = {}
        for kind, pipe in pipes.items():
            stream = pipe.stream(prompt, accelerator="target", generator=torch.Generator().manual_seed(number))
            frames[kind] = torch.cat([block.frames for block in stream])
            text = pipe.scorer_prompt(prompt)
            scores[kind].append(float(score_images(scorer, frames[kind], [text] * len(frames[kind])).mean()))
        changes.append(float((frames["int8"] - frames["float32"]).square().mean().sqrt()))
        motion.append(float(frames["float32"].diff(dim=0).square().mean().sqrt()))
    both = torch.tensor([scores["float32"], scores["int8"]], dtype=torch.float64)
    difference = both[1] - both[0]
    return {
        "clips": len(prompts),
        "mean_score": dict(zip(pipes, both.mean(1).tolist(), strict=True)),
        "mean_difference": float(difference.mean()),
        "half_interval_of_difference": float(1.96 * difference.std() / len(prompts) ** 0.5),
        "change_of_pixels": sum(changes) / len(changes),
        "change_from_frame_to_frame": sum(motion) / len(motion),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=["emoji", "llamagen-b"], help="whose passes are measured")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--timed-images", type=int, default=16)
    parser.add_argument("--sizes", nargs="*", default=[], help="large networks, whose passes are measured one after the other")
    parser.add_argument("--clips", type=int, default=0, help="clips of emoji-video in float32 and int8")
    options = parser.parse_args()
    for code in (TOKEN_PASS, TOKEN_STEPS):
        code.load(wait=True)
    Clock.timer = staticmethod(time.process_time)
    with limit_threads(1):
        document: dict[str, Any] = {"machine": describe_machine(), "int8_passes": explain_int8_passes()}
        document["passes"] = {name: measure_passes(name, options.rounds) for name in options.models}
        if options.images:
            document["images"] = measure_images(options.images, options.timed_images)
        if options.sizes:
            document["sizes"] = measure_sizes(options.sizes)
        if options.clips:
            document["clips"] = measure_clips(options.clips)
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

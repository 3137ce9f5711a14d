"""Seconds of an image that is generated alone: what one person waits, where a run's batches say what a server pays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vargen.bench.compare import compare_methods
from vargen.device import describe_place
from vargen.eval.run import GenerationPlan
from vargen.eval.run_directory import RunDirectory, describe_write_error
from vargen.files import atomic_file

TIMING_FILE = "batch1.json"
NUM_TIMED = 4  # images of each method


def time_single_images(
    plan: GenerationPlan, num: int = NUM_TIMED, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Generate the first images of a run one by one with its methods and the baseline, in turn, and keep their times.

    The times are in `batch1.json` of the run directory, and are measured again only for other methods, machines or counts.

    Args:
        num: images of each method, at most those of the run.

    Returns:
        `machine`, `images`, and by method: `seconds` with `quartiles`, `speedup` over the baseline, `tokens_per_pass`.
    """
    num = min(num, plan.num)
    file = RunDirectory(Path(plan.output)).path / TIMING_FILE
    about = {"machine": describe_place(torch.device(plan.device)), "images": num}
    stored = read_timing(file.parent)
    if stored and {key: stored.get(key) for key in about} == about and set(plan.methods) <= set(stored["methods"]):
        return stored
    pipe = plan.open()
    methods = {name: pipe.resolve_method(name) for name in dict.fromkeys((pipe.baseline, *plan.methods))}
    prompts = [plan.prompt_at(index) for index in range(num)]
    found = compare_methods(pipe, prompts, methods, 1, plan.seed, plan.sampling, progress)
    rows = {
        each.name: {
            "seconds": each.seconds_per_image,
            "quartiles": each.seconds_quartiles,
            "speedup": each.speedup,
            "tokens_per_pass": each.tokens_per_pass,
        }
        for each in found.methods
    }
    measured = {**about, "threads": found.threads, "baseline": found.baseline, "methods": rows}
    try:
        with atomic_file(file) as temporary:
            temporary.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise describe_write_error(TIMING_FILE, error) from error
    return measured


def read_timing(folder: Path) -> dict[str, Any] | None:
    """Return what `time_single_images` has measured for a run directory; None if it has not, or the file is damaged."""
    try:
        found = json.loads((folder / TIMING_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("methods"), dict) else None

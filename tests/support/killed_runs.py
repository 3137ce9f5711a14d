"""A command that is killed while it generates images for an evaluation: what is left, and that the run is resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vargen.eval.run import GenerationPlan, generate_missing_images
from vargen.eval.run_directory import read_manifest


def images(output: Path) -> dict[str, bytes]:
    return {str(file.relative_to(output)): file.read_bytes() for file in sorted(output.glob("images/**/*.png"))}


def lines(output: Path) -> list[tuple[str, int]]:
    return [(r["method"], r["index"]) for file in output.glob("manifest/*.jsonl") for r in read_manifest(file)]


def check_killed_command(plan: GenerationPlan, *options: str, before_kill: Callable[[int], Any] = lambda process: None) -> Any:
    """Kill `vargen eval` after a few images; nothing is lost or generated twice. Returns what `before_kill` did."""
    output = Path(plan.output)
    words = [sys.executable, "-c", "from vargen.cli.main import main; main()", "eval", "--generate-only", "--model", plan.model]
    words += ["--num-images", str(plan.num), "--batch-size", str(plan.batch), "--threads", "1", "--methods", *plan.methods]
    process = subprocess.Popen([*words, *options, "-o", plan.output], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600  # a busy machine takes minutes to start Ray
    while process.poll() is None and len(lines(output)) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    found = before_kill(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = lines(output)
    assert 4 <= len(before) < plan.num, "the kill came too late or too early to show anything"
    assert generate_missing_images(plan) == plan.num - len(before)
    whole = replace(plan, output=str(output.with_name("whole")))
    assert generate_missing_images(whole) == plan.num and images(output) == images(Path(whole.output))
    after = lines(output)
    assert after[: len(before)] == before and len(after) == len(set(after)) == plan.num
    return found

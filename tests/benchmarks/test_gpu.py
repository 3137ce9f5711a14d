"""benchmarks/gpu.py: rows are on disk at once, a run goes on where it stopped, and a crash is reported and not repeated."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def gpu(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", repo_root / "benchmarks" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(done: list[str], *names: str) -> Iterator[tuple[str, Any]]:
    for name in names:
        yield name, lambda name=name: done.append(name) or {"ms": float(len(done))}


def test_a_run_goes_on_where_it_stopped(gpu: ModuleType, tmp_path: Path) -> None:
    file, done = tmp_path / "part.jsonl", list[str]()
    gpu.run_cases(cases(done, "a", "b"), file, 60.0)
    assert done == ["a", "b"] and gpu.read_rows(file) == {"a": {"ms": 1.0}, "b": {"ms": 2.0}}
    with file.open("a") as lines:
        lines.write('["c", nul')  # killed while writing
    gpu.run_cases(cases(done, "a", "b", "d", "e"), file, 60.0)
    assert done == ["a", "b", "d", "e"]
    gpu.run_cases(cases(done, "f"), file, -1.0)
    assert done == ["a", "b", "d", "e"], "no time was left"


def test_a_row_that_crashed_is_not_tried_again_but_one_out_of_time_is(gpu: ModuleType, tmp_path: Path) -> None:
    file, done = tmp_path / "part.jsonl", list[str]()
    file.write_text(json.dumps(["a", None]) + "\n")
    gpu.run_cases(cases(done, "a", "b"), file, 60.0)
    assert done == ["b"] and gpu.read_rows(file)["a"] == gpu.UNFINISHED
    gpu.forget_unfinished(file)
    gpu.run_cases(cases(done, "a", "b"), file, 60.0)
    assert done == ["b", "a"]


def test_an_error_is_a_row(gpu: ModuleType, tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    gpu.run_cases(iter([("a", broken)]), tmp_path / "part.jsonl", 60.0)
    assert "no such kernel" in gpu.read_rows(tmp_path / "part.jsonl")["a"]["result"]


def test_the_command_measures_what_is_missing_and_writes_a_report(gpu: ModuleType, repo_root: Path, tmp_path: Path) -> None:
    measured = [f"emoji, batch {batch}, {method}" for batch, method in ((1, "ar"), (1, "gumbel"), (4, "ar"))]
    (tmp_path / "batches.jsonl").write_text("".join(json.dumps([name, {"tokens/s": 1.5}]) + "\n" for name in measured))
    words = [sys.executable, str(repo_root / "benchmarks" / "gpu.py"), "-o", str(tmp_path), "--device", "cpu"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([*words, "--part", "batches", "--minutes", "15"], check=True, env=environment, capture_output=True)
    rows = gpu.read_rows(tmp_path / "batches.jsonl")
    assert list(rows) == [*measured, "emoji, batch 4, gumbel"]
    assert all(rows[name] == {"tokens/s": 1.5} for name in measured) and rows["emoji, batch 4, gumbel"]["tokens/s"] > 0
    report = (tmp_path / "report.md").read_text()
    assert all(name in report for name in rows) and "not measured on a CPU" in report

"""The device report: parts that fail, crash or are late keep their rows and stop nothing; wrong kernels are named."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rejects import rejects
from tiny_models import tiny_transformer

from vargen.adapters.llamagen import LlamaGenTokenModel
from vargen.decoding import decode, resolve_method
from vargen.device_profiles import FILE, DeviceProfile, derive_profile, find_profile, read_profiles
from vargen.evaluation import device_report
from vargen.evaluation.device_checks import use_variant
from vargen.evaluation.device_parts import PARTS
from vargen.evaluation.device_report import Part, PartResult, Row, SkipPart, WrongResult, run_part, run_report, write_markdown
from vargen.evaluation.kernel_check import run_sanitizer
from vargen.evaluation.replay import ReplayedAcceptance, replay_acceptance
from vargen.models.condition import Condition


def run(part: Any, seconds: float = 60.0) -> tuple[PartResult, list[int]]:
    """Run a generator as a part; returns its result and the number of rows at each save."""
    saved: list[int] = []
    result = PartResult("a", "A part")
    run_part(Part("A part", part), result, "cpu", seconds, lambda each: saved.append(len(each.rows)))
    return result, saved


def test_a_part_is_saved_row_by_row_and_ends_as_it_should() -> None:
    def rows(device: str) -> Iterator[Row]:
        yield {"device": device}
        yield {"device": device}

    result, saved = run(rows)
    assert (result.status, result.rows, saved) == ("done", 2 * [{"device": "cpu"}], [1, 2, 2])
    assert run(rows, seconds=0.0)[0].status == "stopped" and len(run(rows, seconds=0.0)[0].rows) == 1


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (SkipPart("needs CUDA"), "skipped", "needs CUDA"),
        (WrongResult("off by 1"), "failed", "off by 1"),
        (OSError(), "failed", "OSError"),
    ],
)
def test_an_error_keeps_the_rows_before_it(error: Exception, status: str, reason: str) -> None:
    def rows(device: str) -> Iterator[Row]:
        yield {"ms": 1.0}
        raise error

    result, _ = run(rows)
    assert result.status == status and reason in result.reason and result.rows == [{"ms": 1.0}]


SCRIPT = """
import os, signal, sys, time
from vargen.evaluation import device_parts, device_report
def late(device):
    yield {"x": 1}
    time.sleep(60)
def crash(device):
    yield {"x": 2}
    print("the driver is gone", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)
def skip(device):
    raise device_report.SkipPart("needs CUDA")
    yield
device_parts.PARTS = {part.__name__: device_report.Part(part.__name__, part) for part in (late, crash, skip)}
device_report._main(*sys.argv[1:])
"""


@pytest.mark.extended
def test_late_and_crashed_parts_do_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    popen, names, seen = subprocess.Popen, ["late", "crash", "skip"], []

    def start(words: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", SCRIPT, *words[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    parts = {name: Part("-", lambda device: iter(()), share) for name, share in zip(names, (0.15, 1, 1), strict=True)}
    results = run_report(parts, names, "cpu", 120.0, tmp_path, lambda each: seen.append(each.name))
    assert seen == names
    late, crashed, skipped = results
    assert late.status == "stopped" and late.rows == [{"x": 1}]
    assert crashed.status == "failed" and "SIGKILL" in crashed.reason and "the driver is gone" in crashed.reason
    assert crashed.rows == [{"x": 2}] and (skipped.status, skipped.reason) == ("skipped", "needs CUDA")
    assert json.loads((tmp_path / "crash.json").read_text())["rows"] == [{"x": 2}]
    text = write_markdown(results, {"gpu": "none"}, tmp_path).read_text()
    for words in ("gpu: none", "| late | stopped |", "SIGKILL", "Rows before the failure", "needs CUDA"):
        assert words in text
    rejects(lambda: run_report(parts, ["later"], "cpu", 60.0, tmp_path), "part")


def test_without_time_nothing_starts(tmp_path: Path) -> None:
    (result,) = run_report(PARTS, ["passes"], "cpu", 1.0, tmp_path)
    assert result.status == "skipped" and not result.rows and "--part passes" in result.command


def test_parts_that_need_cuda_say_so() -> None:
    if torch.cuda.is_available() or device_checks_are_interpreted():
        pytest.skip("kernels run here")
    with pytest.raises(SkipPart, match="CUDA"):
        next(PARTS["kernels"].run("cpu"))
    rejects(lambda: run_sanitizer(1.0), "compute-sanitizer", FileNotFoundError)


def device_checks_are_interpreted() -> bool:
    from vargen.kernels.launch import INTERPRETED

    return INTERPRETED


def test_a_replay_commits_as_the_histogram_says() -> None:
    model = LlamaGenTokenModel(tiny_transformer("class", grid_size=8, n_layer=1), guidance=1.0)
    condition, seeds = Condition(class_labels=torch.zeros(16, dtype=torch.int64)), torch.arange(16)
    for committed in (1, 3):
        method = replay_acceptance(resolve_method("gumbel:window=4"), [0] * committed + [5])
        stats = decode(model, condition, seeds, method).stats
        assert stats.passes == -(-63 // committed) + 1 or stats.tokens_per_pass == pytest.approx(committed, abs=0.2)
    halves = decode(model, condition, seeds, replay_acceptance(resolve_method("gumbel:window=4"), [0, 1, 0, 1])).stats
    assert halves.tokens_per_pass == pytest.approx(2, abs=0.25), "one and three tokens equally often"
    rejects(lambda: ReplayedAcceptance([7, 0]), "histogram")


def test_variants_are_set_for_their_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("VARGEN_KERNELS", "auto")
    monkeypatch.delenv("VARGEN_CUDA_GRAPHS", raising=False)
    with use_variant("kernels, graphs"):
        assert (os.environ["VARGEN_KERNELS"], os.environ["VARGEN_CUDA_GRAPHS"]) == ("triton", "1")
    assert os.environ["VARGEN_KERNELS"] == "auto" and "VARGEN_CUDA_GRAPHS" not in os.environ


# -- profiles -----------------------------------------------------------------------------------------------------------


def measured(status: str = "done", graphs: float = 1.0) -> list[PartResult]:
    rows: list[Row] = [
        {"model": "emoji", "paradigm": "next-token", "tokens": tokens, "variant": variant, "ms": ms}
        for tokens, (variant, ms) in itertools.product(
            (1, 16), {"torch": 3.0, "kernels": 2.0, "kernels, graphs": graphs}.items()
        )
    ]
    rows += [{"model": "var", "paradigm": "next-scale", "tokens": tokens, "variant": "torch", "ms": 1.0} for tokens in (1, 256)]
    passes = PartResult("passes", "", "done", rows=rows)
    return [PartResult("kernels", "", status, rows=[{"result": ""}]), PartResult("tokens", "", "done"), passes]


def test_a_profile_says_what_was_measured_and_right() -> None:
    assert derive_profile(measured(), "page") == {"kernels": True, "graphs": True, "window": 16, "source": "page"}
    assert derive_profile(measured(graphs=2.5), "")["graphs"] is False
    assert derive_profile(measured("failed"), "")["kernels"] is False, "wrong kernels are not used, however fast"
    assert derive_profile(measured("stopped"), "")["kernels"] is None
    assert derive_profile([], "") == {"kernels": None, "graphs": None, "window": None, "source": ""}


def test_the_packaged_profiles_are_valid() -> None:
    assert set(json.loads(FILE.read_text())) == set(read_profiles())
    assert find_profile("cpu") == DeviceProfile() and replace(DeviceProfile(), graphs=True).graphs
    assert device_report.PartResult("a", "b").status == "stopped"

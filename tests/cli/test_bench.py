"""`vargen bench`: shape of the reports and bad input; times are not judged here."""

import json
from pathlib import Path
from typing import Any

import pytest


def test_step_reports_every_case(run: Any, text_model: Path) -> None:
    words = ("--model", text_model, "--tokens-per-pass", "1,4", "--batch-size", "1,2", "--repeats", 2, "--threads", 1)
    words += ("--guidance",)
    result = run("bench", "step", *words, "--json", "out/a.json")
    assert result.exit_code == 0, result.output
    for part in ("tokens", "quartiles", "x weights", "GB/s", "torch"):
        assert part in result.stdout
    document = json.loads(Path("out/a.json").read_text())
    assert document["machine"]["cpu"] and document["machine"]["torch"]
    (report,) = document["reports"]
    assert report["guidance"] and report["cached_tokens"] == 8 and report["gigabytes_per_second"] > 0
    cases = [(case["batch"], case["tokens"]) for case in report["results"]]
    assert cases == [(1, 1), (1, 4), (2, 1), (2, 4)]
    for case in report["results"]:
        low, high = case["quartiles"]
        assert 0 < low <= case["milliseconds"] <= high and case["passes"] >= 2
        assert case["over_read"] == pytest.approx(case["milliseconds"] / report["read_milliseconds"])
    assert [case["over_one"] for case in report["results"] if case["tokens"] == 1] == [1.0, 1.0]

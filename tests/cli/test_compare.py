"""`vargen compare` and `vargen bench`: reports, files and bad input; times are not judged here."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image


@pytest.fixture
def prompts(run: Any) -> Path:
    Path("prompts.txt").write_text("a cat\na dog\na red apple\n")
    return Path("prompts.txt")


def test_reports_every_method_with_images_figures_and_histograms(run: Any, text_model: Path, prompts: Path) -> None:
    words = ("--prompt-file", prompts, "--model", text_model, "--batch-size", 2)
    words += ("--methods", "sjd:window=4,gumbel:window=4,gsd:window=4")
    result = run("compare", *words, "-o", "out/grid.png", "--json", "out/a.json", "--top-k", 8)
    assert result.exit_code == 0, result.output
    for part in ("tokens/pass", "gumbel", "relaxation", "grid.png"):
        assert part in result.stdout
    document = json.loads(Path("out/a.json").read_text())
    assert document["machine"]["cpu"] and document["batch"] == 2
    assert document["prompts"] == ["a cat", "a dog", "a red apple", "a cat"] and document["seeds"] == [0, 1, 2, 3]
    by_name = {method["name"]: method for method in document["methods"]}
    assert list(by_name) == ["ar", "sjd:window=4", "gumbel:window=4", "gsd:window=4"]
    by_name = {name.split(":")[0]: method for name, method in by_name.items()}
    assert by_name["ar"]["speedup"] == 1.0
    assert by_name["ar"]["num_identical_images"] == by_name["gumbel"]["num_identical_images"] == 4
    assert by_name["gumbel"]["relaxation_per_image"] == 0
    assert by_name["gsd"]["kind"] == "relaxed" and by_name["gsd"]["relaxation_per_image"] > 0
    for method in by_name.values():
        assert sum(k * n for k, n in enumerate(method["committed_histogram"])) == 4 * 16
        batches = 4 // document["batch"]
        assert sum(method["passes_by_width"].values()) == (method["passes_per_batch"] - 1) * batches  # the prefill feeds none
        assert 0 < sum(method["share_by_part"].values()) <= 1.001
    with Image.open("out/grid.png") as grid:
        assert grid.width > 3 * 128 and grid.height > 4 * 128


def test_default_methods_leave_out_what_the_model_cannot_run(run: Any, text_model: Path, prompts: Path) -> None:
    result = run("compare", "--prompt-file", prompts, "--model", text_model, "--json", "-", "-o", "grid.png")
    assert result.exit_code == 0, result.output
    assert "speculative was left out" in result.stderr and "layer-skip was left out" in result.stderr
    names = [method["name"] for method in json.loads(result.stdout)["methods"]]
    assert names[:6] == ["ar", "sjd", "scd", "gumbel", "gsd", "lantern-jacobi"]
    assert names[6:] == ["diversed", "wavefront", "pac", "gumbel-tree", "lookup", "recycle"]
    asked = run("compare", "--prompt-file", prompts, "--model", text_model, "--methods", "speculative")
    assert asked.exit_code == 2 and "needs a draft model" in asked.stderr


def test_step_reports_every_case(run: Any, text_model: Path) -> None:
    words = ("--model", text_model, "--tokens-per-pass", "1,4", "--batch-size", "1,2", "--repeats", 2, "--threads", 1)
    words += ("--guidance",)
    result = run("bench", *words, "--json", "out/a.json")
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

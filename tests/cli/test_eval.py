"""`vargen eval` and `score` as a user calls them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

MEASURE = ("--scorers", "tiny_measures:level", "--extractor", "tiny_measures:net")


def prompts_file(text: str = "a red apple\n# no prompt\na dog\na cat\n") -> str:
    Path("prompts.txt").write_text(text)
    return "prompts.txt"


def test_one_command_generates_scores_and_reports(run: Any, text_model: Path) -> None:
    words = ("eval", "--model", text_model, "-o", "out", "--prompt-file", prompts_file(), "--threads", 1)
    words += ("--num-images", 6, "--batch-size", 4, "--methods", "ar,gumbel,gsd:budget=3,window=4", *MEASURE)
    done = run(*words)
    assert done.exit_code == 0, done.stderr
    assert "same as ar" in done.stdout and "gsd:budget=3,window=4" in done.stdout and "100.0 %" in done.stdout
    plots = ("quality_vs_speed.svg", "quality_vs_speed.pdf") if find_spec("matplotlib") else ()  # the lowest set has none
    for name in ("metrics.json", "report.md", "table.tex", "methods.png", *plots):
        assert Path("out", name).is_file() and str(Path("out", name)) in done.stdout
    report = Path("out/report.md").read_text()
    assert "| gumbel | exact | 6 |" in report and "![methods](methods.png)" in report and str(Path.cwd()) not in report
    for what in ("machine", "dtype", "sampling", "images", "image size", "reference", "command", "vargen", "date"):
        assert f"- {what}: " in report
    assert "- images: 6 per method of 3 prompts, seeds from 0\n" in report and "- dtype: float32\n" in report
    assert "18 of 18 images; finished" in Path("out/log.txt").read_text()
    alone = json.loads(Path("out/batch1.json").read_text())
    assert alone["images"] == 4 and list(alone["methods"]) == ["ar", "gumbel", "gsd:budget=3,window=4"]
    again = run(*words, "--json", "-")
    document = json.loads(again.stdout)
    assert again.exit_code == 0 and [method["num_images"] for method in document["methods"]] == [6, 6, 6]
    assert document["methods"][1]["similarity"]["identical_fraction"] == 1.0
    assert json.loads(Path("out/batch1.json").read_text()) == alone, "nothing is timed again"
    for name, row in zip(alone["methods"], document["methods"], strict=True):
        assert row["speed"]["batch1"] == alone["methods"][name] and row["speed"]["batch"] == 4
    assert len(Path("out/manifest/shard-1-of-1.jsonl").read_text().splitlines()) == 18, "nothing was drawn twice"


def test_a_model_of_bits(run: Any, bits_model: Path) -> None:
    words = ("eval", "--model", bits_model, "-o", "out", "--prompt-file", prompts_file(), "--threads", 1, "--num-timed", 0)
    done = run(*words, "--methods", "plain,economy,code", "--num-images", 3, *MEASURE, "--json", "-")
    assert done.exit_code == 0, done.stderr
    methods = json.loads(done.stdout)["methods"]
    assert [(each["name"], each["num_images"]) for each in methods] == [("plain", 3), ("economy", 3), ("code", 3)]


def test_the_packaged_model_is_scored_by_its_scorer(run: Any) -> None:
    done = run(
        "eval", "--model", "emoji-var", "--methods", "plain", "--num-images", 2, "-o", "out", "--num-timed", 0, "--json", "-"
    )
    (method,) = json.loads(done.stdout)["methods"]
    assert done.exit_code == 0 and list(method["scores"]) == ["emoji-scorer"] and method["distances"]["frechet"] > 0
    assert method["speed"]["batch1"] is None and not Path("out/batch1.json").exists()


def test_files_of_benchmarks_give_prompts_and_exports(run: Any, text_model: Path) -> None:
    lines = [json.dumps({"tag": "colors", "include": [], "prompt": each}) for each in ("a red apple", "a dog")]
    Path("metadata.jsonl").write_text("\n".join(lines) + "\n")
    Path("dpg").mkdir()
    for item, prompt in (("b7", "a dog"), ("a12", "a cat\n")):
        Path("dpg", f"{item}.txt").write_text(prompt)
    words = ("eval", "--model", text_model, "--num-images", 4, "--num-timed", 0, "--threads", 1, "--scorers", "none")
    words += ("--extractor", "none")
    first = run(*words, "-o", "one", "--prompt-file", "metadata.jsonl", "--export", "geneval")
    assert first.exit_code == 0 and Path("one/geneval/ar/00001/metadata.jsonl").read_text() == lines[1] + "\n", first.stderr
    again = run("eval", "--images", "one", "--scorers", "none", "--extractor", "none", "--export", "t2i-compbench")
    assert again.exit_code == 0 and Path("one/t2i-compbench/ar/samples/a dog_000003.png").is_file(), again.stderr
    second = run(*words, "-o", "two", "--prompt-file", "dpg", "--export", "dpg-bench")
    assert second.exit_code == 0 and sorted(each.name for each in Path("two/dpg-bench/ar").iterdir()) == ["a12.png", "b7.png"]
    refused = run(*words, "-o", "three", "--prompt-file", "dpg", "--export", "geneval")
    assert refused.exit_code == 2 and "export geneval" in refused.stderr and not Path("three").exists()
    Path("bad.jsonl").write_text('{"tag": "colors"}\n')
    bad = run(*words, "-o", "four", "--prompt-file", "bad.jsonl")
    assert bad.exit_code == 2 and "--prompt-file" in bad.stderr and not Path("four").exists()


def test_shards_generate_apart_and_are_scored_together(run: Any, class_model: Path) -> None:
    words = ("--model", class_model, "-o", "out", "--num-images", 9, "--batch-size", 2, "--threads", 1, "--methods", "ar,sjd")
    first = run("eval", *words, "--shard", "1/2", *MEASURE)
    assert first.exit_code == 0 and "vargen eval --images out" in first.stderr and not Path("out/report.md").exists()
    second = run("eval", "--generate-only", *words, "--shard", "2/2")
    assert second.exit_code == 0 and "vargen eval --images out" in second.stderr
    scored = run("eval", "--images", "out", *MEASURE)
    assert scored.exit_code == 0 and Path("out/report.md").is_file(), scored.stderr


def test_a_folder_of_others_is_scored_and_becomes_a_reference(run: Any) -> None:
    Path("theirs").mkdir()
    for i in range(8):
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(f"theirs/{i}.png")
    words = ("eval", "--images", "theirs", "--prompt-file", prompts_file("a\n" * 8), *MEASURE)
    made = run(*words, "--save-reference", "r.npz", "--export-samples", "s.npz", "--json", "out.json")
    assert made.exit_code == 0 and "level" in made.stdout, made.stderr
    assert json.loads(Path("out.json").read_text())["methods"][0]["scores"]["level"]["num_images"] == 8
    with np.load("s.npz") as samples:
        assert samples["arr_0"].shape == (8, 16, 16, 3)
    small = run(*words, "--save-reference", "small.npz", "--reference-features", 5)
    assert small.exit_code == 0, small.stderr
    with np.load("small.npz") as kept:
        assert kept["vargen_features"].shape == (5, 3) and kept["sigma"].dtype == np.float32 and kept["vargen_count"] == 8
    for reference in ("r.npz", "s.npz", "theirs"):
        done = run(*words, "--reference", reference)
        assert done.exit_code == 0 and "Frechet" in done.stdout, done.stderr
        row = done.stdout.splitlines()[1].split()
        assert row[0] == "theirs" and " 0.0000" in done.stdout
    alone = ("--scorers", "none", "--extractor", "tiny_measures:net")
    measured = run("eval", "--images", "s.npz", *alone, "--reference", "r.npz", "--json", "-")
    distances = json.loads(measured.stdout)["methods"][0]["distances"]
    assert distances["frechet"] == pytest.approx(0, abs=1e-6) and distances["precision"] == 1.0
    with np.load("s.npz") as samples:
        np.save("bare.npy", samples["arr_0"])
    bare = run("eval", "--images", "bare.npy", *alone, "--save-reference", "r2.npz")
    assert bare.exit_code == 0, bare.stderr
    with np.load("r.npz") as one, np.load("r2.npz") as two:
        assert np.allclose(one["sigma"], two["sigma"]) and np.allclose(one["vargen_features"], two["vargen_features"])
    refused = run("eval", "--images", "bare.npy", *MEASURE)
    assert refused.exit_code == 2 and "--scorers none" in refused.stderr
    Path("theirs/3.png").write_bytes(b"cut")
    kept = run(*words, "--skip-unreadable")
    assert kept.exit_code == 0 and "theirs/3.png" in kept.stderr and "left out: 1" in kept.stdout


def test_scorers_of_nan_and_statistics_of_others_end_it(run: Any, text_model: Path) -> None:
    words = ("eval", "--model", text_model, "-o", "out", "--prompt-file", prompts_file(), "--threads", 1)
    np.savez("foreign.npz", mu=np.zeros(3), sigma=np.eye(3))
    foreign = run(*words, *MEASURE, "--reference", "foreign.npz")
    assert foreign.exit_code == 2 and "foreign.npz" in foreign.stderr and not Path("out").exists()
    missing = run(*words, "--scorers", "image-reward:weights=no.pt")
    assert missing.exit_code == 2 and "fetch ImageReward.pt" in missing.stderr and not Path("out").exists()
    nans = run(*words, "--scorers", "tiny_measures:nan", "--extractor", "none")
    assert nans.exit_code == 2 and "nan gave nan" in nans.stderr and not Path("out/report.md").exists()
    assert run(*words, *MEASURE).exit_code == 0

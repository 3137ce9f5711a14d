"""`vargen bench`: shape of the reports and bad input; times are not judged here."""

import json
from pathlib import Path
from typing import Any

import pytest


def test_step_reports_every_case(run: Any, text_model: Path) -> None:
    words = ("--model", text_model, "--tokens-per-pass", "1,4", "--batch-size", "1,2", "--repeats", 2, "--threads", 1)
    words += ("--guidance",)
    result = run("bench", "step", *words, "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
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


def test_step_writes_table_json_and_plot(run: Any, class_model: Path) -> None:
    words = ("--model", class_model, "--tokens-per-pass", "2,16", "--batch-size", "1", "--repeats", 1)
    result = run("bench", "step", *words, "--json", "out/a.json", "--plot", "out/a.png")
    assert result.exit_code == 0, result.output
    for part in ("tokens", "quartiles", "x weights", "GB/s", "torch"):
        assert part in result.stdout
    assert json.loads(Path("out/a.json").read_text())["reports"][0]["results"][0]["over_one"] is None
    assert Path("out/a.png").read_bytes().startswith(b"\x89PNG")


def test_baseline(run: Any, text_model: Path) -> None:
    result = run("bench", "baseline", "--model", text_model, "--batch-size", "1,2", "--seconds", 0, "--json", "-")
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)["reports"]
    assert [report["batch"] for report in reports] == [1, 2]
    for report in reports:
        assert report["guidance_scale"] == 2.0 and report["runs"] == 1
        assert report["tokens_per_second"] == pytest.approx(report["batch"] * report["tokens_per_second_per_image"])
        assert sum(report["share_by_part"].values()) == pytest.approx(1)
    assert "tokens/s" in run("bench", "baseline", "--model", text_model, "--batch-size", "1", "--seconds", 0).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["step", "--tokens-per-pass", "1,0"], ["tokens_per_pass must be whole numbers", "'1,0'"]),
        (["step", "--tokens-per-pass", "17"], ["16 of the grid"]),
        (["step", "--batch-size", "x"], ["batch_size must be whole numbers"]),
        (["baseline", "--compile", "--device", "cpu"], ["compile must be False on a CPU"]),
        (["step", "--batch-size", "999999999"], ["batch_size must be whole numbers of at least 1 and at most 1024"]),
        (["baseline", "--seconds", "nan"], ["seconds must be a finite number"]),
        (["step", "--plot", "a.gif"], ["plot must be a file ending in .png"]),
        (["step", "--json", "a.txt"], ["json must be a file ending in .json"]),
        (["step", "--repeats", "0"], ["repeats must be a whole number of at least 1"]),
        (["step", "--threads", "0"], ["threads must be"]),
        (["baseline", "--seconds", "-1"], ["seconds must be a finite number of at least 0"]),
        (["baseline", "--batch-size", ""], ["batch_size must be whole numbers"]),
        (["baseline", "--model", "/nowhere"], ["unknown model"]),
    ],
)
def test_bad_input(run: Any, text_model: Path, words: list[str], said: list[str]) -> None:
    result = run("bench", words[0], "--model", text_model, *words[1:])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr and result.stdout == ""
    for part in said:
        assert part in result.stderr
    assert list(Path().iterdir()) == []


def test_a_random_network_has_the_official_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vargen.evaluation.networks import open_benchmark_model
    from vargen.pipelines.llamagen import LLAMAGEN

    tiny: Any = {"transformer": {"dim": 32, "n_layer": 1, "n_head": 2}}
    monkeypatch.setitem(LLAMAGEN.official_sizes, "llamagen-b", tiny)  # type: ignore[arg-type]
    found = open_benchmark_model("llamagen-b", torch.float32, torch.device("cpu"))
    opened = found.transformer
    assert opened.config.condition == "class" and opened.config.grid_size == 16
    assert opened.output.weight.std() > 0.01
    assert found.weight_bytes == sum(
        p.nbytes
        for name, p in opened.named_parameters()
        if name not in ("tok_embeddings.weight", "cls_embedding.embedding_table.weight")
    )


def test_images_of_a_next_scale_model(run: Any, scale_model: Path) -> None:
    words = ("bench", "images", "--model", scale_model, "--repeats", 1, "--batch-size", "1,2", "--threads", 1)
    result = run(*words, "--json", "a.json")
    assert result.exit_code == 0, result.output
    reports = json.loads(Path("a.json").read_text())["reports"]
    assert [report["batch"] for report in reports] == [1, 2] and all(report["speedup"] > 0 for report in reports)
    for part in ("published", "speedup", "roofline", "and pixels", "GFLOP/s"):
        assert part in result.stdout


def test_images_need_a_next_scale_model(run: Any, text_model: Path) -> None:
    result = run("bench", "images", "--model", text_model)
    assert result.exit_code == 2 and "model must be a next-scale one, such as var-d16" in result.stderr
    assert "repeats must be" in run("bench", "images", "--repeats", 0).stderr


def test_kernels_say_what_a_cpu_cannot_measure(run: Any) -> None:
    sizes = ("--shape", "emoji", "--tokens-per-pass", "2", "--cached-tokens", "8", "--repeats", 1)
    words = ("bench", "kernels", "--device", "cpu", *sizes, "--json", "-")
    result = run(*words)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["kernels"] == "reference" and "runs on cpu" in document["reason"]
    ways = {(each["operation"], each["implementation"]): each for each in document["timings"]}
    assert {name for name, _ in ways} == {"attention, a layer", "sampler", "accept, chain", "accept, tree", "commit"}
    for (_, way), each in ways.items():
        measured = each["microseconds"] is not None
        assert measured == (each["reason"] is None) == (way in ("torch, our path", "SDPA with a mask")) and each["bytes"] > 0
    result = run(*words[:-2])
    assert "not measured" in result.stdout and "GB/s copied" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "gpt"], "shape must be one of emoji"),
        (["--tokens-per-pass", "257"], "tokens_per_pass must be whole numbers of at least 1 and at most 256"),
        (["--repeats", "0"], "repeats must be a whole number of at least 1"),
    ],
)
def test_kernels_refuse_other_shapes(run: Any, words: list[str], said: str) -> None:
    result = run("bench", "kernels", *words)
    assert result.exit_code != 0 and said in result.output


def test_gpu_writes_a_report_of_what_runs_here(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the process of a part would run interpreted kernels
    result = run("bench", "gpu", "--part", "kernels", "--device", "cpu", "-o", "report", "--minutes", "0.5", "--json")
    assert result.exit_code == 0, result.output
    (part,) = json.loads(result.stdout)["parts"]
    assert part["status"] == "skipped" and "needs CUDA" in part["reason"]
    assert "needs CUDA" in Path("report/report.md").read_text() and not Path("report/profile.json").exists()
    assert json.loads(Path("report/report.json").read_text())["parts"] == [part]


@pytest.mark.parametrize(
    ("words", "name"), [(["--minutes", "0"], "minutes"), (["--part", "speed"], "part"), (["-o", "a.txt"], "output")]
)
def test_gpu_refuses_bad_input_before_it_writes(run: Any, words: list[str], name: str) -> None:
    Path("a.txt").touch()
    result = run("bench", "gpu", "-o", "report", *words)
    assert result.exit_code == 2 and name in result.stderr and not Path("report").exists()

"""Exported folders are read as the benchmarks' own scripts read them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rejects import rejects

from vargen.eval.export import export_run, validate_export
from vargen.eval.run_directory import ManifestWriter, RunDirectory, file_digest

DETECT = [{"tag": "colors", "include": [{"class": c}], "prompt": f"a photo of a {c}"} for c in ("cat", "dog", "cow")]


def run_of(path: Path, records: list[dict], num: int) -> RunDirectory:
    """A run of two methods; every image has a color of its own, and is named by it."""
    run = RunDirectory(path)
    settings = {"methods": {"ar": {}, "gsd:budget=5": {}}, "subjects": [each["prompt"] for each in records], "num": num}
    run.open_or_create({**settings, "prompt_records": records})
    with ManifestWriter(run.manifest_path(1, 1)) as manifest:
        for method, red in (("ar", 50), ("gsd:budget=5", 100)):
            for index in range(num):
                file = path / run.image(method, index)
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (4, 6), (red, index, 0)).save(file)
                manifest.append({"method": method, "index": index, "sha256": file_digest(file)})
    return run


def color(file: Path | str, x: int = 0, y: int = 0) -> tuple[int, ...]:
    return tuple(np.asarray(Image.open(file))[y, x])


def test_geneval_reads_each_prompt_with_its_line_and_its_images(tmp_path: Path) -> None:
    ours, theirs = export_run(run_of(tmp_path / "run", DETECT, 6), "geneval")
    assert ours.name == "ar" and theirs.name == "gsd-budget-5"
    found = {}
    for subfolder in os.listdir(theirs):  # as `evaluation/evaluate_images.py` does
        assert (theirs / subfolder).is_dir() and subfolder.isdigit()
        with open(theirs / subfolder / "metadata.jsonl") as file:
            metadata = json.load(file)
        names = sorted(os.listdir(theirs / subfolder / "samples"))
        assert all(re.match(r"\d+\.png", name) for name in names)
        found[int(subfolder)] = metadata, [color(theirs / subfolder / "samples" / name) for name in names]
    assert found == {p: (DETECT[p], [(100, p, 0), (100, p + 3, 0)]) for p in range(3)}


def test_t2i_compbench_reads_prompts_from_names_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = export_run(run_of(tmp_path / "run", DETECT, 6), "t2i-compbench")[0] / "samples"
    names = sorted(os.listdir(folder), key=lambda name: int(name.split("_")[-1].split(".")[0]))  # as `BLIP_vqa.py` does
    assert [name.split("_")[0] for name in names] == [each["prompt"] for each in DETECT for _ in range(2)]
    assert [color(folder / name) for name in names] == [(50, p + 3 * sample, 0) for p in range(3) for sample in range(2)]


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_dpg_bench_crops_the_images_of_a_prompt_out_of_a_square(samples: int, tmp_path: Path) -> None:
    records = [{"prompt": "a cat", "item": "partiprompts3"}, {"prompt": "a dog", "item": "COCOval17"}]
    folder = export_run(run_of(tmp_path / "run", records, 2 * samples), "dpg-bench")[0]
    assert sorted(name.split(".")[0] for name in os.listdir(folder)) == ["COCOval17", "partiprompts3"]
    corners = [(0, 0), (4, 0), (0, 6), (4, 6)][:samples]  # of crops of the size of an image, in the order of the script
    assert [color(folder / "COCOval17.png", *corner) for corner in corners] == [(50, 1 + 2 * k, 0) for k in range(samples)]


def test_a_run_that_does_not_fit_is_refused_by_the_name_of_what_is_missing(tmp_path: Path) -> None:
    plain = [{"prompt": "a cat"}, {"prompt": "a dog"}]
    prompts = ["a cat", "a dog"]
    for layout, subjects, records, num, named in (
        ("geneval", prompts, plain, 2, "prompt-file"),
        ("geneval", prompts, None, 2, "prompt-file"),
        ("dpg-bench", prompts, plain, 2, "prompt-file"),
        ("dpg-bench", prompts, [{**each, "item": "../x"} for each in plain], 2, "prompt-file"),
        ("dpg-bench", prompts, [{**each, "item": "x"} for each in plain], 10, "at most 4"),
        ("t2i-compbench", prompts, plain, 3, "num_images"),
        ("t2i-compbench", ["a_cat"], plain[:1], 1, "a_cat"),
        ("t2i-compbench", ["../cat"], plain[:1], 1, "cat"),
        ("t2i-compbench", [3, 4], None, 2, "classes"),
    ):
        rejects(lambda arguments=(layout, subjects, records, num): validate_export(*arguments), named, ValueError)
    run = run_of(tmp_path / "run", plain, 4)
    (run.path / run.image("ar", 3)).unlink()
    rejects(lambda: export_run(run, "t2i-compbench"), "1 are missing", ValueError)
    assert not (run.path / "t2i-compbench").exists()

"""Scores, features and reports of pictures, whoever made them; of bad ones; and of a run that someone has changed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rejects import rejects
from tiny_measures import calls
from tiny_models import class_pipeline

from vargen.eval.features import FeatureStatistics, read_adm_samples
from vargen.eval.measurement import MetricModels, measure_images
from vargen.eval.metrics import compute_distances, mean_with_ci
from vargen.eval.run import GenerationPlan, UnreadableImageError, generate_missing_images, list_images
from vargen.eval.run_directory import RunDirectory
from vargen.eval.score import evaluate_folder, evaluate_run, export_adm_samples, load_reference
from vargen.scoring.protocol import to_tensor

PARTS = MetricModels(scorers=("tiny_measures:Brightness",), extractor="tiny_measures:tower", threads=1)


def folder_of(path: Path, count: int, size: tuple[int, int] = (16, 16), seed: int = 0, level: int = 256) -> Path:
    random = np.random.default_rng(seed)
    path.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.fromarray(random.integers(0, level, (*size[::-1], 3), dtype=np.uint8)).save(path / f"{i:04d}.png")
    return path


# -- any folder ------------------------------------------------------------------------------------------------------------


def test_any_folder_of_images_is_scored(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs", 70)
    shown = list_images(folder, ["word"] * 70)
    reference = load_reference(folder_of(tmp_path / "real", 80, seed=1), PARTS)
    found = evaluate_folder("theirs", shown, PARTS, reference)
    (row,) = found.rows
    means = torch.stack([to_tensor([Image.open(p.file)]).mean() for p in shown]) * 4
    assert row.scores["brightness"]["mean"] == pytest.approx(float(means.mean()), rel=1e-5)
    half = row.scores["brightness"]["ci95_half_width"]
    assert half == pytest.approx(1.959964 * float(means.double().std()) / 70**0.5, rel=1e-4)
    assert row.distances["frechet"] >= 0 and row.distances["frechet_ci95_half_width"] > 0
    assert 0.5 < row.distances["precision"] <= 1 and 0.5 < row.distances["recall"] <= 1
    assert abs(row.distances["kid"]) < 3 * row.distances["kid_std"]
    assert any("biased upwards" in note for note in row.notes) and any("1,000 are usual" in note for note in row.notes)
    dark = evaluate_folder("dark", list_images(folder_of(tmp_path / "dark", 70, level=200), ["w"] * 70), PARTS, reference)
    assert dark.rows[0].distances["frechet"] > 5 * row.distances["frechet"]
    assert dark.rows[0].distances["precision"] < row.distances["precision"]


def test_what_few_images_cannot_tell_is_said(tmp_path: Path) -> None:
    features = torch.randn(4, 8)
    found, notes = compute_distances(features, None, FeatureStatistics.from_features(torch.randn(20, 8)), False)
    assert found["frechet"] > 0 and found["frechet_ci95_half_width"] is None
    assert any("4 images" in note and "rank 3 of 8" in note for note in notes) and any("20 images" in note for note in notes)
    bare = FeatureStatistics.from_features(torch.randn(20, 2), keep=False)
    found, notes = compute_distances(torch.randn(3, 2), None, bare, False)
    assert "kid" not in found and any("no features" in note for note in notes)
    assert mean_with_ci(torch.tensor([2.0])) == {"mean": 2.0, "ci95_half_width": None, "num_images": 1}


def test_what_was_measured_is_not_measured_again_but_what_changed_is(tmp_path: Path) -> None:
    calls.clear()
    shown = list_images(folder_of(tmp_path / "p", 130), [f"{'a' * (i % 3 + 1)}" for i in range(130)])
    first = measure_images({"g": shown}, PARTS, tmp_path / "cached")["g"]
    assert sum(calls) == 130
    again = measure_images({"g": shown}, PARTS, tmp_path / "cached")["g"]
    assert sum(calls) == 130
    for name, columns in first.columns.items():
        assert all(torch.equal(again.columns[name][key], value) for key, value in columns.items())
    changed = [replace(p, text="other") if p.index == 129 else p for p in shown]
    measure_images({"g": changed}, PARTS, tmp_path / "cached")
    assert sum(calls) == 132, "the last chunk of two, and no more"
    next((tmp_path / "cached").rglob("brightness/g/00000.npz")).write_bytes(b"PK cut")
    measure_images({"g": changed}, PARTS, tmp_path / "cached")
    assert sum(calls) == 132 + 64
    measure_images({"g": changed}, replace(PARTS, resize=20), tmp_path / "cached")
    assert sum(calls) == 132 + 64 + 130


@pytest.mark.parametrize("damage", ["truncated", "text"])
def test_unreadable_images_are_named_or_passed_over(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path / "p", 6)
    victim = folder / "0002.png"
    data = victim.read_bytes()
    victim.write_bytes({"truncated": data[: len(data) // 2], "text": b"not a picture"}[damage])
    shown = list_images(folder, ["a"] * 6)
    with pytest.raises(UnreadableImageError, match=r"0002\.png cannot be read.*--skip-unreadable"):
        evaluate_folder("p", shown, PARTS)
    found = evaluate_folder("p", shown, replace(PARTS, keep_going=True))
    assert found.rows[0].num_images == 5 and found.rows[0].scores["brightness"]["num_images"] == 5
    assert "files that could not be read and are left out: 1" in found.rows[0].notes and "0002.png" in caplog.text


def test_images_of_other_sizes_are_refused_or_resized(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", 4)
    folder_of(tmp_path / "wide", 1, (24, 16))
    (tmp_path / "wide/0000.png").rename(folder / "0009.png")
    shown = list_images(folder, ["a"] * 5)
    with pytest.raises(ValueError, match=r"0009\.png is 24 x 16 pixels, and the first of p is 16 x 16; --resize"):
        evaluate_folder("p", shown, PARTS)
    resized = replace(PARTS, resize=16)
    assert evaluate_folder("p", shown, resized).rows[0].num_images == 5
    reference = load_reference(folder_of(tmp_path / "real", 9, (32, 32)), PARTS)
    with pytest.raises(ValueError, match="32 x 32"):
        evaluate_folder("p", shown, resized, reference)


def test_samples_go_out_and_come_back_as_a_reference(tmp_path: Path) -> None:
    shown = list_images(folder_of(tmp_path / "p", 9, (20, 16)), ["a"] * 9)
    export_adm_samples(tmp_path / "s.npz", shown, 12)
    assert read_adm_samples(tmp_path / "s.npz")[0] == (9, 12, 12, 3)
    from_samples = load_reference(tmp_path / "s.npz", PARTS)
    from_folder = load_reference(tmp_path / "p", replace(PARTS, resize=12))
    cached = load_reference(tmp_path / "s.npz", PARTS, tmp_path / "cached")
    (file,) = (tmp_path / "cached/reference").iterdir()
    FeatureStatistics.from_features(torch.zeros(5, 4), cached.extractor).write(file)
    assert load_reference(tmp_path / "s.npz", PARTS, tmp_path / "cached").count == 5, "extracted again"
    assert torch.allclose(from_samples.mean, from_folder.mean, atol=1e-6) and from_samples.size == (12, 12)


def test_a_published_reference_has_statistics_of_all_and_samples_of_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ADM's files: mu and sigma of the training set; arr_0, ten thousand pictures, for precision and recall."""
    shown = np.random.default_rng(0).integers(0, 256, (9, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "adm.npz", mu=np.full(4, 7.0), sigma=np.eye(4), arr_0=shown)
    extractor: Any = PARTS.load()["extractor"]
    monkeypatch.setattr(extractor, "identity", "inception-of-four")
    monkeypatch.setattr("vargen.eval.features.DIMENSIONS", 4)
    found = load_reference(tmp_path / "adm.npz", PARTS)
    assert found.mean.tolist() == [7.0] * 4 and found.count is None
    assert found.features is not None and torch.allclose(
        found.features, extractor(torch.from_numpy(shown).permute(0, 3, 1, 2)).pooled
    )


# -- a run -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> GenerationPlan:
    folder = tmp_path_factory.mktemp("run")
    class_pipeline().save_pretrained(folder / "model")
    methods = ("ar", "gumbel", "sjd", "gsd:delta=1,budget=none")
    return GenerationPlan(str(folder / "model"), str(folder / "run"), methods, tuple(range(10)), num=12, batch=6, threads=1)


@pytest.fixture(scope="module")
def run(plan: GenerationPlan) -> RunDirectory:
    generate_missing_images(plan)
    return RunDirectory(Path(plan.output))


def test_a_run_is_reported(run: RunDirectory) -> None:
    found = evaluate_run(run, PARTS)
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["ar", "gumbel", "sjd", "gsd:delta=1,budget=none"] and found.baseline == "ar"
    assert rows["ar"].speed["speedup"] == 1.0 and rows["ar"].speed["tokens_per_pass"] == 1.0 and not rows["ar"].similarity
    assert rows["gumbel"].similarity["identical_fraction"] == 1.0 and "psnr" not in rows["gumbel"].similarity
    assert rows["gumbel"].scores["brightness"]["difference_to_baseline"]["mean"] == 0.0
    assert (
        rows["sjd"].kind == "exact"
        and 0 <= rows["sjd"].similarity["identical_fraction"] < 1
        and rows["sjd"].similarity["psnr"] > 0
    )
    relaxed = rows["gsd:delta=1,budget=none"]
    assert relaxed.kind == "relaxed" and relaxed.speed["relaxation"] > 0 and relaxed.speed["tokens_per_pass"] > 1
    difference = relaxed.scores["brightness"]["mean"] - rows["ar"].scores["brightness"]["mean"]
    assert relaxed.scores["brightness"]["difference_to_baseline"]["mean"] == pytest.approx(difference, abs=1e-6)
    assert rows["gumbel"].similarity["frechet"] == pytest.approx(0, abs=1e-6)


def test_a_run_in_progress_is_reported_as_far_as_it_is(run: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "part")
    part = RunDirectory(tmp_path / "part")
    for file in (part.path / "images/sjd").rglob("*.png"):
        file.unlink()
    next((part.path / "images/gumbel").rglob("*.png")).write_bytes(b"")
    rows = {row.name: row for row in evaluate_run(part, replace(PARTS, scorers=())).rows}
    assert "sjd" not in rows and rows["gumbel"].num_images == 11
    assert any("11 of 12" in note for note in rows["gumbel"].notes)
    (part.path / "run.json").unlink()
    with pytest.raises(ValueError, match="not a run"):
        evaluate_run(part, PARTS)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are of POSIX")
@pytest.mark.parametrize("other", ["pipe", "device"])
def test_what_is_no_regular_file_is_never_waited_for(
    other: str, plan: GenerationPlan, run: RunDirectory, tmp_path: Path
) -> None:
    """It is measured or generated again, or named."""
    changed = replace(plan, output=str(shutil.copytree(run.path, tmp_path / "run")))
    folder, scored = Path(changed.output), replace(PARTS, extractor=None)

    def put(file: Path) -> None:
        file.unlink(missing_ok=True)
        os.mkfifo(file) if other == "pipe" else file.symlink_to("/dev/zero")

    def evaluated() -> list[int]:
        return sorted(row.num_images for row in evaluate_run(RunDirectory(folder), scored).rows)

    assert evaluated() == [12] * 4
    image = min((folder / "images").rglob("*.png"))
    put(image)
    for file in (folder / "measurements").rglob("*.npz"):
        put(file)
    assert evaluated() == [11, 12, 12, 12]
    assert generate_missing_images(changed) == 1 and image.is_file() and not image.is_symlink()
    put(folder / "manifest" / "shard-1-of-1.jsonl")
    rejects(evaluated, "shard-1-of-1.jsonl")
    rejects(lambda: generate_missing_images(changed), "shard-1-of-1.jsonl")
    put(folder / "run.json")
    rejects(evaluated, "run.json")

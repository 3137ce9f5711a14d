"""A run that someone has changed: what is damaged is measured or drawn again, or named; nothing is waited for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline

from vargen.evaluation.evaluate import EvaluationResult, evaluate_run, write_report_files
from vargen.evaluation.generation import GenerationPlan, generate_missing_images
from vargen.evaluation.measurement import MetricModels
from vargen.evaluation.reference_statistics import FeatureStatistics
from vargen.evaluation.run_directory import RunDirectory
from vargen.reading import open_regular, read_text
from vargen.scoring import BatchedScorer
from vargen.scoring.protocol import Images, to_tensor

calls: list[int] = []


class Brightness(BatchedScorer):
    def __init__(self) -> None:
        super().__init__("brightness")
        self.identity = "brightness-1"

    def score_batch(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        calls.append(len(prompts))
        return to_tensor(images).mean((1, 2, 3))


def tower() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


PARTS = MetricModels(scorers=("damaged_parts:Brightness",), extractor="damaged_parts:tower", threads=1)
METHODS = ("ar", "gumbel")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-class"
    class_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clean(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "clean"
    generate_missing_images(asked(model, output))
    return output


@pytest.fixture(autouse=True)
def in_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that waits fails."""

    def late(*_: Any) -> None:
        raise TimeoutError("waited for what never comes")

    calls.clear()
    monkeypatch.setitem(sys.modules, "damaged_parts", sys.modules[__name__])
    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "run"))


def asked(model: Path, output: Path) -> GenerationPlan:
    return GenerationPlan(str(model), str(output), METHODS, tuple(range(10)), num=5, batch=5, threads=1)


def evaluated(run: Path) -> EvaluationResult:
    folder = RunDirectory(run)
    found = evaluate_run(folder, PARTS)
    write_report_files(folder, found)
    json.loads((run / "metrics.json").read_text())
    return found


# -- manifests ---------------------------------------------------------------------------------------------------------------


WRONG: list[tuple[str, Any]] = [
    *[("seconds", value) for value in (-5, float("nan"), float("inf"), "x", None, True, 1e300, 10**400)],
    *[(name, "x") for name in ("tokens", "active_passes", "passes", "relaxation", "batch", "threads", "index")],
    *[(name, -1) for name in ("tokens", "active_passes", "passes", "relaxation", "batch", "threads", "index")],
    *[("sha256", 5), ("text", 5), ("method", [])],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: str(value)[:10])
def test_a_line_with_a_value_that_cannot_be_is_named(
    name: str, value: Any, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = run / "manifest" / "shard-1-of-1.jsonl"
    first, *rest = manifest.read_text().splitlines()
    manifest.write_text("\n".join([json.dumps({**json.loads(first), name: value}), *rest]) + "\n")
    assert len(RunDirectory(run).records()) == 9
    assert "line 1 of" in caplog.text and str(manifest) in caplog.text


def test_its_image_is_generated_again(run: Path, model: Path) -> None:
    manifest = run / "manifest" / "shard-1-of-1.jsonl"
    first, *rest = manifest.read_text().splitlines()
    manifest.write_text("\n".join([json.dumps({**json.loads(first), "seconds": -5}), *rest]) + "\n")
    found = evaluated(run)
    assert sorted(row.num_images for row in found.rows) == [4, 5] and all(0 < row.speed["seconds"] < 1e6 for row in found.rows)
    assert generate_missing_images(asked(model, run)) == 1, "the picture of that line"
    assert [row.num_images for row in evaluated(run).rows] == [5, 5]


def test_a_manifest_folder_that_is_a_file_is_named(run: Path, model: Path) -> None:
    shutil.rmtree(run / "manifest")
    (run / "manifest").write_text("")
    for step in (lambda: generate_missing_images(asked(model, run)), lambda: evaluate_run(RunDirectory(run), PARTS)):
        with pytest.raises(ValueError, match=r"manifest.* must be a folder"):
            step()


# -- what was measured -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["nan", "replaced", "shorter", "digest", "columns", "cut", "huge"])
def test_changed_measurements_are_measured_again(damage: str, run: Path) -> None:
    before = [row.scores["brightness"]["mean"] for row in evaluate_run(RunDirectory(run), PARTS).rows]
    calls.clear()
    assert [row.scores["brightness"]["mean"] for row in evaluate_run(RunDirectory(run), PARTS).rows] == before and not calls
    for file in (run / "measurements").glob("[bt]*/*/*.npz"):
        with np.load(file) as held:
            arrays = {name: held[name] for name in held}
        values = "scores" if "scores" in arrays else "features"
        if damage == "nan":
            arrays[values] = np.full_like(arrays[values], np.nan)
        elif damage == "replaced":
            arrays[values] = arrays[values] + 1
        elif damage == "shorter":
            arrays = {name: array[:-1] if array.ndim else array for name, array in arrays.items()}
        elif damage == "digest":
            del arrays["digest"]
        elif damage == "columns":
            del arrays[values]
        np.savez(file, **arrays)
        if damage == "cut":
            file.write_bytes(file.read_bytes()[:-40])
        if damage == "huge":
            with zipfile.ZipFile(file, "w") as archive, archive.open("scores.npy", "w") as opened:
                header = {"descr": "<f4", "fortran_order": False, "shape": (10**13,)}
                np.lib.format.write_array_header_1_0(opened, header)
    assert [row.scores["brightness"]["mean"] for row in evaluate_run(RunDirectory(run), PARTS).rows] == before
    assert sum(calls) == 10


def test_statistics_that_were_changed_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.npz"
    FeatureStatistics.from_features(torch.randn(8, 3), "x").write(file)
    assert FeatureStatistics.read(file).count == 8
    with np.load(file) as held:
        arrays = {name: held[name] for name in held}
    np.savez(file, **{**arrays, "mu": arrays["mu"] + 1})
    with pytest.raises(ValueError, match="changed after it was written"):
        FeatureStatistics.read(file)
    foreign = {name: array for name, array in arrays.items() if name != "vargen_digest"}
    for wrong in ({"vargen_features": np.full((8, 3), np.nan)}, {"vargen_features": np.zeros((8, 2))}, {"vargen_count": "x"}):
        np.savez(file, **{**foreign, **wrong})
        rejects(lambda: FeatureStatistics.read(file), "r.npz")


# -- what is no regular file -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are of POSIX")
@pytest.mark.parametrize("other", ["pipe", "device"])
def test_what_is_no_regular_file_is_never_waited_for(other: str, run: Path, model: Path, tmp_path: Path) -> None:
    def put(file: Path) -> None:
        file.unlink(missing_ok=True)
        os.mkfifo(file) if other == "pipe" else file.symlink_to("/dev/zero")

    evaluated(run)
    images = sorted((run / "images").rglob("*.png"))
    put(images[0])
    for file in (run / "measurements").rglob("*.npz"):
        put(file)
    assert sorted(row.num_images for row in evaluated(run).rows) == [4, 5]
    assert generate_missing_images(asked(model, run)) == 1 and images[0].is_file(), "the picture is drawn again"
    put(run / "manifest" / "shard-2-of-2.jsonl")
    with pytest.raises(ValueError, match=r"shard-2-of-2\.jsonl.*not a regular file"):
        evaluate_run(RunDirectory(run), PARTS)
    (run / "manifest" / "shard-2-of-2.jsonl").unlink()
    put(run / "manifest" / "shard-1-of-1.jsonl")
    rejects(lambda: generate_missing_images(asked(model, run)), "shard-1-of-1.jsonl")
    put(run / "run.json")
    rejects(lambda: evaluate_run(RunDirectory(run), PARTS), "run.json")
    for reading in (open_regular, lambda path: read_text(path, "prompts", 100)):
        with pytest.raises((OSError, ValueError), match="not a regular file"):
            reading(run / "run.json")

"""A run that someone has changed: what is damaged is measured or generated again, or named; nothing is waited for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline

from vargen.evaluation.evaluate import evaluate_run
from vargen.evaluation.generation import GenerationPlan, generate_missing_images
from vargen.evaluation.measurement import MetricModels
from vargen.evaluation.run_directory import RunDirectory
from vargen.scoring import BatchedScorer
from vargen.scoring.protocol import Images, to_tensor

calls: list[int] = []


class Brightness(BatchedScorer):
    identity = "brightness-1"

    def __init__(self) -> None:
        super().__init__("brightness")

    def score_batch(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        calls.append(len(prompts))
        return to_tensor(images).mean((1, 2, 3))


PARTS = MetricModels(scorers=("damaged_parts:Brightness",), threads=1)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GenerationPlan:
    """A run of ten images."""
    monkeypatch.setitem(sys.modules, "damaged_parts", sys.modules[__name__])
    class_pipeline().save_pretrained(tmp_path / "model")
    folders = str(tmp_path / "model"), str(tmp_path / "run")
    plan = GenerationPlan(*folders, ("ar", "gumbel"), tuple(range(10)), num=5, batch=5, threads=1)
    assert generate_missing_images(plan) == 10
    return plan


def means(plan: GenerationPlan) -> list[float]:
    return [row.scores["brightness"]["mean"] for row in evaluate_run(RunDirectory(Path(plan.output)), PARTS).rows]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are of POSIX")
@pytest.mark.parametrize("other", ["pipe", "device"])
def test_what_is_no_regular_file_is_never_waited_for(other: str, plan: GenerationPlan) -> None:
    run = Path(plan.output)

    def put(file: Path) -> None:
        file.unlink(missing_ok=True)
        os.mkfifo(file) if other == "pipe" else file.symlink_to("/dev/zero")

    means(plan)
    image = min((run / "images").rglob("*.png"))
    put(image)
    for file in (run / "measurements").rglob("*.npz"):
        put(file)
    assert sorted(row.num_images for row in evaluate_run(RunDirectory(run), PARTS).rows) == [4, 5]
    assert generate_missing_images(plan) == 1 and image.is_file() and not image.is_symlink()
    manifest = run / "manifest" / "shard-1-of-1.jsonl"
    put(manifest)
    rejects(lambda: means(plan), "shard-1-of-1.jsonl")
    rejects(lambda: generate_missing_images(plan), "shard-1-of-1.jsonl")
    put(run / "run.json")
    rejects(lambda: means(plan), "run.json")

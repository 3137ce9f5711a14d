"""A data set and a config at tiny size, and the property that killed runs resume, for tests of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.emoji.dataset import EmojiDataset
from vargen.training.config import Schedule
from vargen.training.next_token import NextTokenConfig
from vargen.training.run import Trainer, TrainingRun

_plot_metrics = TrainingRun.plot_metrics  # before conftest.py replaces it


def data(count: int = 24, size: int = 16) -> EmojiDataset:
    random = np.random.default_rng(0)
    images = np.full((count, size, size, 3), 255, dtype=np.uint8)
    records = []
    for i in range(count):
        images[i, 4:12, 4:12] = random.integers(0, 255, 3)
        records.append(
            {
                "label": f"thing {i % 5}", "concept": f"{i}", "tags": ["round"], "synonyms": [], "tones": [],
                "skin_tone": False, "group": "objects",
                "style": ("3d", "flat", "noto", "twemoji")[i % 4], "weight": 1.0, "split": "validation" if i < 4 else "train",
            }
        )  # fmt: skip
    return EmojiDataset(images, records)


def generator_recipe(**changes) -> NextTokenConfig:
    model = {
        "dim": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "grid_size": 8, "caption_dim": 32,
        "cls_token_num": 16, "multiple_of": 32,
    }  # fmt: skip
    base = {
        "schedule": Schedule(steps=14, learning_rate=3e-3, warmup_steps=2), "batch_size": 4, "shift_variants": 1,
        "dropout": 0.1, "token_noise": 0.1, "neighbor_noise": 0.2, "first_token_weight": 5.0, "recall_images": 0,
        "flip_probability": 0.5, "recolor_probability": 0.3,
        "evaluate_every": 7, "checkpoint_every": 5,
    }  # fmt: skip
    return NextTokenConfig(model=model, **{**base, **changes})


class Killed(BaseException):
    pass


def check_resumes(train: Callable[[Path], Any], folder: Path, killed_at: int, part: str) -> None:
    """A run killed at a step ends with the weights, metrics and log of an uninterrupted run."""
    expected = train(folder / "whole")
    update = Trainer.update

    def killed(trainer: Trainer, step: int, loss: Any) -> None:
        if step == killed_at:
            raise Killed
        update(trainer, step, loss)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Trainer, "update", killed)
        train(folder / "killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "plot_metrics", _plot_metrics)
        assert train(folder / "killed") == expected
    (weights,) = (folder / "whole" / part).glob("*.safetensors")
    assert weights.read_bytes() == (folder / "killed" / part / weights.name).read_bytes()
    logs = [[{**line, "seconds": 0} for line in TrainingRun(folder / name, {}, 0).read_log()] for name in ("whole", "killed")]
    assert logs[0] == logs[1] and (folder / "killed" / "curves.png").stat().st_size > 1000

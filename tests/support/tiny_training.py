"""A data set at tiny size, and the property that killed runs resume, for tests of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vargen.training.dataset import CaptionedImages
from vargen.training.loop import Trainer, TrainingRun


def data(count: int = 24, size: int = 16) -> CaptionedImages:
    random = np.random.default_rng(0)
    images = np.full((count, size, size, 3), 255, dtype=np.uint8)
    for image in images:
        image[4:12, 4:12] = random.integers(0, 255, 3)
    records = [{"captions": [f"thing {i % 5}"], "split": "validation" if i < 4 else "train"} for i in range(count)]
    return CaptionedImages(images, records)


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
    assert train(folder / "killed") == expected
    (weights,) = (folder / "whole" / part).glob("*.safetensors")
    assert weights.read_bytes() == (folder / "killed" / part / weights.name).read_bytes()
    logs = [[{**line, "seconds": 0} for line in TrainingRun(folder / name, {}, 0).read_log()] for name in ("whole", "killed")]
    assert logs[0] == logs[1]

"""The packaged next-scale model as users get it: its size, its card, its pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vargen.decoding import list_methods
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.registry import open_pipeline
from vargen.scoring.image_text import ImageTextScorer

THINGS = ["a red apple", "grinning face, 3d style", "a blue heart", "flag of ukraine", "a green tree", "a red car"]


@pytest.fixture(scope="module")
def pipe() -> VisualPipeline:
    opened = open_pipeline("emoji-var", torch_dtype=torch.float32)
    opened.set_progress_bar_config(disable=True)
    return opened


@pytest.fixture(scope="module")
def scorer() -> ImageTextScorer:
    return ImageTextScorer()


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("method", [preset.name for preset in list_methods("next-scale")])
def test_by_every_method_images_show_what_was_asked_for(pipe: Any, scorer: ImageTextScorer, method: str) -> None:
    shown = pipe(THINGS, accelerator=method, generator=seeded(*range(6))).images
    fits = scorer.embed_images(shown) @ scorer.embed_captions(THINGS).T
    assert (fits.argmax(1) == torch.arange(len(THINGS))).float().mean() >= 5 / 6


def test_what_a_mask_keeps_stays(pipe: Any) -> None:
    pixels = pipe("a red apple, 3d style", generator=seeded(0)).images[0]
    mask = Image.new("L", pixels.size)
    mask.paste(255, (64, 0, 128, 128))
    again = pipe("a green apple, 3d style", image=pixels, mask=mask, generator=seeded(0)).images[0]
    before, after = (np.asarray(each, dtype=float)[40:100] for each in (pixels, again))
    assert np.abs(before - after)[:, 20:48].mean() < 25, "the left half stays red"
    right = after[:, 80:100].mean((0, 1))
    assert right[1] > right[0], "and the right one is green"

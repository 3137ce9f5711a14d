"""The packaged models of images as users get them: pictures by every method, and seeds in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_families import seeded

from vargen import LlamaGenPipeline
from vargen.decoding import list_methods
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.loading import open_pipeline
from vargen.scoring.image_text import ImageTextScorer

THINGS = ["a red apple", "grinning face, 3d style", "a blue heart", "flag of ukraine", "a green tree", "a red car"]


@pytest.fixture(scope="module")
def pipe() -> VisualPipeline:
    return open_pipeline("emoji-var", torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def scorer() -> ImageTextScorer:
    return ImageTextScorer()


@pytest.mark.parametrize("method", [preset.name for preset in list_methods("next-scale")])
def test_by_every_method_images_show_what_was_asked_for(pipe: Any, scorer: ImageTextScorer, method: str) -> None:
    shown = pipe(THINGS, accelerator=method, generator=seeded(*range(6))).images
    fits = scorer.embed_images(shown) @ scorer.embed_captions(THINGS).T
    assert (fits.argmax(1) == torch.arange(len(THINGS))).float().mean() >= 5 / 6


def test_bfloat16_keeps_its_seed_and_stays_near_float32():
    """Two runs in bfloat16 are one picture; against float32 the laws move by rounding: most of the first tokens agree."""
    pipe = LlamaGenPipeline.from_pretrained("emoji", torch_dtype=torch.bfloat16)
    stop = {"callback_on_step_end": lambda *a: {"stop": a[1] == 10}, "output_type": "latent"}
    a, b = (pipe("grinning face", generator=seeded(5)[0], **stop).images for _ in range(2))
    assert torch.equal(a, b)
    pipe.transformer.float()
    exact = pipe("grinning face", generator=seeded(5)[0], **stop).images
    assert (a == exact).flatten()[:16].float().mean() > 0.5

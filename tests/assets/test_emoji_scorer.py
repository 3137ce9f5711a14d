"""The packaged scorer: it tells what its card says, from the installed files alone."""

import pytest
import torch
from PIL import Image

from vargen.eval.features import FeatureStatistics, load_extractor
from vargen.eval.score import REFERENCE
from vargen.scoring.image_text import ImageTextScorer, scorer_folder


@pytest.fixture(scope="module")
def scorer() -> ImageTextScorer:
    return ImageTextScorer("emoji-scorer")


def test_a_caption_is_embedded_once_and_many_are_forgotten(scorer: ImageTextScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    embed = scorer.embed_captions
    monkeypatch.setattr(scorer, "embed_captions", lambda texts: (asked.extend(texts), embed(texts))[1])
    monkeypatch.setattr(scorer, "_latest", {})
    monkeypatch.setattr("vargen.scoring.image_text._KEPT_CAPTIONS", 20)
    images = [Image.new("RGB", (64, 64), "red")] * 2
    first = scorer.score(images, ["a red square", "a cat"])
    assert torch.equal(scorer.score(images, ["a red square", "a cat"]), first) and asked == ["a red square", "a cat"]
    for start in range(0, 60, 12):
        scorer.score(images[:1] * 12, [f"number {start + k}" for k in range(12)])
        assert len(scorer._latest) <= 20
    assert torch.allclose(scorer.score(images, ["a red square", "a cat"]), first, atol=1e-4)


def test_the_packaged_statistics_are_those_of_its_weights() -> None:
    extractor = load_extractor("emoji-scorer")
    statistics = FeatureStatistics.read(scorer_folder("emoji-scorer") / REFERENCE)
    assert statistics.extractor == extractor.identity and statistics.count == 14058

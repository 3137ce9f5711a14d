"""Everyday captions: what they promise about styles and held-out concepts, and their word list."""

from __future__ import annotations

import random

import pytest

from recipes.emoji.everyday import everyday_words, sample_everyday_caption


def record(**changes: object) -> dict[str, object]:
    about = {"label": "automobile", "group": "travel & places", "style": "3d", "tags": ["vehicle"], "synonyms": ["vehicle"]}
    return {**about, "tones": [], **changes}


def test_only_the_default_style_goes_unnamed() -> None:
    rng = random.Random(0)
    for style in ("flat", "noto"):
        assert all(sample_everyday_caption(record(style=style), rng).endswith(f"{style} style") for _ in range(200))
    unnamed = sum(not sample_everyday_caption(record(), rng).endswith("style") for _ in range(400))
    assert 160 < unnamed < 320


def test_captions_use_everyday_words_and_articles() -> None:
    rng = random.Random(1)
    found = {sample_everyday_caption(record(), rng) for _ in range(400)}
    assert {"a car", "an automobile"} <= found
    assert all(text == text.lower() for text in found)
    assert sample_everyday_caption(record(), random.Random(2)) == sample_everyday_caption(record(), random.Random(2))


def test_skin_tones_are_always_named() -> None:
    rng, toned = random.Random(3), record(label="thumbs up", group="people & body", tones=["dark"])
    assert all("dark skin tone" in sample_everyday_caption(toned, rng) for _ in range(100))


@pytest.mark.parametrize("text", ["car", "automobile: ", "a: b\na: c"])
def test_a_malformed_list_is_refused(text: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "words.txt").write_text(text)
    monkeypatch.setattr("recipes.emoji.everyday.WORDS", tmp_path / "words.txt")
    with pytest.raises(ValueError, match="words"):
        everyday_words.__wrapped__()

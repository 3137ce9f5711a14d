"""Captions of the emoji data set: sensible English, lower-case, and reproducible draws."""

import random
from typing import Any

import pytest
from rejects import rejects

from recipes.emoji.captions import captions, sample_caption, to_noun_phrase


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("flag: France", "flag of france"),
        ("keycap: #", "keycap #"),
        ("man: red hair", "man with red hair"),
        ("woman: bald", "bald woman"),
        ("couple with heart: woman, man", "couple with heart, woman and man"),
        ("Japanese “here” button", "japanese here button"),
    ],
)
def test_labels_become_phrases(label: str, expected: str) -> None:
    assert to_noun_phrase(label) == expected


def _record(**changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {"label": "red apple", "group": "food & drink", "style": "3d"}
    record |= {"tags": ["apple", "fruit", "FR"], "synonyms": ["fruit", "FR"], "tones": []}
    return record | changes


def test_captions() -> None:
    found = captions(_record())
    assert found[0] == "red apple, 3d style"
    assert {"a red apple, 3d style", "emoji of a red apple, 3d style", "fruit, 3d style", "red apple"} <= set(found)
    assert "red apple, apple, fruit, fr, 3d style" in found
    assert "fr, 3d style" not in found
    assert len(set(found)) == len(found) and all(c == c.lower() for c in found)
    toned = captions(_record(label="waving hand", group="people & body", tones=["medium-dark"]))
    assert all("medium-dark skin tone" in caption for caption in toned)
    both = captions(_record(tones=["light", "dark"], style="noto"))
    assert both[0] == "red apple, light and dark skin tones, noto style"
    assert captions(_record(label="umbrella", group="objects"))[1] == "an umbrella, 3d style"
    assert captions(_record(label="unicorn"))[1] == "a unicorn, 3d style"
    assert not any("a french fries" in caption for caption in captions(_record(label="french fries")))
    assert captions({"label": "pickle", "group": "components", "style": "flat"})[0] == "pickle, flat style"
    rejects(lambda: captions(_record(style="oil")), "oil")


def test_sampled_captions() -> None:
    rng = random.Random(0)
    generated = [sample_caption(_record(tones=["dark"]), rng) for _ in range(2000)]
    again = random.Random(0)
    assert generated == [sample_caption(_record(tones=["dark"]), again) for _ in range(2000)]
    assert 0.27 < sum("style" not in caption for caption in generated) / 2000 < 0.33
    assert all("dark skin tone" in caption and caption == caption.lower() for caption in generated)
    assert sum("red apple" in caption for caption in generated) > 1500
    assert {"a red apple, dark skin tone, 3d style", "fruit, dark skin tone"} <= set(generated)
    bare = {"label": "pickle", "group": "components", "style": "flat"}
    allowed = {"pickle", "emoji of pickle", "pickle, flat style", "emoji of pickle, flat style"}
    assert {sample_caption(bare, rng) for _ in range(200)} == allowed

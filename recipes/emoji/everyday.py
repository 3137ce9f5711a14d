"""Captions as people type prompts: everyday words for what emoji show, short phrases, and mostly no style."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recipes.emoji.captions import noun_and_article, sample_caption, style_phrase, with_article
from recipes.emoji.dataset import EmojiDataset, load_emoji_dataset

WORDS = Path(__file__).with_name("everyday_words.txt")

# Probabilities used by `sample_everyday_caption`.
_USUAL = 0.2  # a caption of `sample_caption`
_EVERYDAY_WORD = 0.5  # another word instead of the name, where there is one
_NAME_ALONE, _ARTICLE = 0.25, 0.5  # otherwise a phrase
_STYLE_OMITTED = 0.6
_DEFAULT_STYLE = "3d"  # captions without a style are of this one, so that they do not mean a mixture of styles

_PHRASES = ("the {name}", "my {name}", "one {name}", "{name} emoji", "a picture of {article}", "a drawing of {article}",
            "an image of {article}", "draw {article}", "{article} on a white background", "just {article}")  # fmt: skip
_ADJECTIVES = {
    "animals & nature": ("cute", "little", "big", "happy"),
    "food & drink": ("tasty", "fresh", "delicious"),
    "travel & places": ("big", "little", "nice"),
    "objects": ("new", "simple", "nice"),
}


@cache
def everyday_words() -> Mapping[str, tuple[str, ...]]:
    """Return the other words for an emoji, by its label in emojibase.

    Raises:
        ValueError: for a line without a label and words, or a label that occurs twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for line in WORDS.read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        label, colon, words = line.partition(": ")
        phrases = tuple(word.strip().lower() for word in words.split(",") if word.strip())
        if not colon or not phrases or label in found:
            raise ValueError(f"{WORDS.name} must have lines of the form 'label: word, word', each label once, got {line!r}")
        found[label] = phrases
    return found


def sample_everyday_caption(record: Mapping[str, Any], rng: random.Random) -> str:
    """Sample a caption of a record as people would type it.

    Args:
        record: an entry of ``records.json``, as in `sample_caption`. rng: equal states give equal captions.

    Returns:
        A lower-case string, without a style only for images of the default style.
    """
    no_style = record["style"] == _DEFAULT_STYLE and rng.random() < _STYLE_OMITTED
    if record.get("tones") or record["group"] in ("flags", "components") or rng.random() < _USUAL:
        text = sample_caption(record, rng)
        style = style_phrase(record["style"])
        return text if no_style or text.endswith(style) else f"{text}, {style}"
    words = everyday_words().get(record["label"])
    name = rng.choice(words) if words and rng.random() < _EVERYDAY_WORD else None
    body = _phrase(name or noun_and_article(record)[0], record["group"], rng)
    return body if no_style else f"{body}, {style_phrase(record['style'])}"


def _phrase(name: str, group: str, rng: random.Random) -> str:
    uniform = rng.random()
    if uniform < _NAME_ALONE:
        return name
    article = with_article(name, group) or name
    if uniform < _NAME_ALONE + _ARTICLE:
        return article
    adjectives = _ADJECTIVES.get(group, ())
    if adjectives and rng.random() < 1 / 3:
        phrase = f"{rng.choice(adjectives)} {name}"
        return with_article(phrase, group) or phrase
    return rng.choice(_PHRASES).format(name=name, article=article)


@dataclass(frozen=True)
class EverydayDataset(EmojiDataset):
    """The emoji data set with everyday captions in training; evaluations use the usual ones."""

    def sample_caption(self, i: int, rng: random.Random) -> str:
        return sample_everyday_caption(self.records[i], rng)


def load_everyday_dataset(folder: Path) -> EverydayDataset:
    """Load a folder built by `build_emoji_dataset`."""
    built = load_emoji_dataset(folder)
    return EverydayDataset(**{name: getattr(built, name) for name in built.__dataclass_fields__})

"""Captions of the records of the emoji data set: plain lower-case English built from names and keywords."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

STYLES = ("3d", "flat", "twemoji", "noto")
CHANNEL_COLORS = ("red", "green", "blue")  # in the order of the channels

# Probabilities used by `sample_caption`; the name itself is what people type, so it dominates.
_STYLE_OMITTED = 0.3
_EMOJI_OF = 0.12
_ARTICLE = 0.5
_NAME_WITH_TAGS = 0.15
_SYNONYM = 0.1
_TAGS_ONLY = 0.07

# Last words that take no "a"/"an": mass nouns and plurals that do not end in "s".
_NO_ARTICLE = frozenset(
    "rice bread bacon butter salt sake popcorn broccoli garlic ginger money fire people food meat milk ice "
    "fog snow tea tofu fish-and-chips up down on off yarn luggage art men women children cheese sushi "
    "spaghetti toast football baseball softball basketball volleyball tennis chess bowling fencing darts "
    "off-limits ok free cool new ng sos vs zzz id soon top back end".split()
)
_ARTICLE_GROUPS = frozenset(
    {
        "smileys & emotion",
        "people & body",
        "animals & nature",
        "food & drink",
        "travel & places",
        "activities",
        "objects",
    }
)


def to_noun_phrase(label: str) -> str:
    """Turn an emojibase label into a plain lower-case noun phrase, such as ``"flag of france"``.

    Labels of the form ``"kind: detail"`` are rewritten ("man: red hair" becomes "man with red hair");
    quotation marks are dropped.
    """
    text = " ".join(label.lower().replace("“", "").replace("”", "").split())
    kind, colon, detail = text.partition(": ")
    if not colon:
        return text
    if kind in ("flag", "family"):
        return f"{kind} of {detail}"
    if kind in ("man", "woman", "person") and detail == "bald":
        return f"bald {kind}"
    if kind in ("man", "woman", "person"):
        return f"{kind} with {detail}"
    if kind == "keycap":
        return f"keycap {detail}"
    return f"{kind}, {detail.replace(', ', ' and ')}"


def style_phrase(style: str) -> str:
    """Return the words that request a style, such as ``"3d style"``; ValueError for an unknown style."""
    if style not in STYLES:
        raise ValueError(f"unknown emoji style {style!r}; expected one of {', '.join(STYLES)}")
    return f"{style} style"


def with_article(phrase: str, group: str) -> str | None:
    """Return a phrase of a group with "a" or "an", or None where an article would read badly (plurals, flags, signs)."""
    last = phrase.split(",")[0].split(" with ")[0].split(" of ")[0].split(" in ")[0].split()[-1]
    plural = last.endswith("s") and not last.endswith(("ss", "us", "is"))
    if group not in _ARTICLE_GROUPS or plural or last in _NO_ARTICLE or not phrase[0].isalpha():
        return None
    # "u", "eu" and "ew" mostly have the sound of "you" here (unicorn, euro, ewe); "um-", "up-" and "un-" do not.
    vowel = (phrase[0] in "aeio" and not phrase.startswith(("eu", "ew"))) or phrase.startswith(("um", "up", "una", "unh"))
    return f"{'an' if vowel else 'a'} {phrase}"


def noun_and_article(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of a record's concept, and the article that it takes: "a", "an" or the empty string."""
    name = to_noun_phrase(record["label"])
    return name, (with_article(name, record["group"]) or name)[: -len(name)].rstrip()


def _tone_phrase(tones: list[str]) -> str:
    """Return ``"medium-dark skin tone"``, ``"light and dark skin tones"`` or the empty string."""
    if not tones:
        return ""
    return f"{tones[0]} skin tone" if len(tones) == 1 else f"{' and '.join(tones)} skin tones"


def _parts(record: Mapping[str, Any]) -> tuple[str, str | None, str, list[str], list[str]]:
    """Return the name of a record, the name with its article, skin-tone phrase, tags and synonyms, all lower-case."""
    name = to_noun_phrase(record["label"])
    tags = [tag.lower() for tag in record.get("tags", ()) if tag.lower() != name]
    # Two-letter keywords are country codes and chat slang; alone they name nothing.
    synonyms = [synonym.lower() for synonym in record.get("synonyms", ()) if len(synonym) > 2]
    return name, with_article(name, record["group"]), _tone_phrase(record.get("tones", [])), tags, synonyms


def _join(body: str, *extras: str) -> str:
    return ", ".join([body, *(extra for extra in extras if extra)])


def captions(record: Mapping[str, Any]) -> list[str]:
    """List the typical captions of a record, without duplicates, in a fixed order.

    Args:
        record: an entry of ``records.json``; reads ``label``, ``group``, ``style`` and, where present,
            ``tags``, ``synonyms`` and ``tones``.

    Returns:
        Lower-case strings; the first is the canonical caption (name, skin tone, style). The later ones add an article, "emoji
            of", keywords or synonyms, or omit the style.

    Raises:
        KeyError: a required field is missing. ValueError: the style is unknown.
    """
    name, article, tone, tags, synonyms = _parts(record)
    style = style_phrase(record["style"])
    bodies = [name, *([article] if article else []), f"emoji of {article or name}", *synonyms[:3]]
    found = [_join(body, tone, style) for body in bodies]
    if tags:
        found.append(_join(name, *tags[:3], tone, style))
    if len(tags) > 1:
        found.append(_join(tags[0], *tags[1:4], tone, style))
    found += [_join(body, tone) for body in bodies]
    return list(dict.fromkeys(found))


def sample_caption(record: Mapping[str, Any], rng: random.Random) -> str:
    """Sample one caption of a record for training.

    Most captions contain the name, with or without an article, some with one to three keywords; a few consist of a synonym or
    of keywords alone. 30 % omit the style; a skin tone is always named.

    Args:
        record: as in `captions`.
        rng: the source of randomness; equal states give equal captions.

    Returns:
        A lower-case string.

    Raises:
        KeyError: a required field is missing. ValueError: the style is unknown.
    """
    name, article, tone, tags, synonyms = _parts(record)
    style = "" if rng.random() < _STYLE_OMITTED else style_phrase(record["style"])
    body = article if article and rng.random() < _ARTICLE else name
    uniform = rng.random()
    if uniform < _TAGS_ONLY and len(tags) > 1:
        return _join(*rng.sample(tags, rng.randint(2, min(4, len(tags)))), tone, style)
    if uniform < _TAGS_ONLY + _SYNONYM and synonyms:
        return _join(rng.choice(synonyms), tone, style)
    if rng.random() < _EMOJI_OF:
        body = f"emoji of {body}"
    if uniform > 1 - _NAME_WITH_TAGS and tags:
        return _join(body, *rng.sample(tags, rng.randint(1, min(3, len(tags)))), tone, style)
    return _join(body, tone, style)


# Images of the first groups contain no text. Hair, skin and flags cannot change color without changing what they are.
_UNWRITTEN = frozenset({"animals & nature", "food & drink", "travel & places", "activities", "objects", "smileys & emotion"})
_FIXED_COLOR = frozenset({"people & body", "flags", "components"})
_NAMES_A_SIDE = frozenset("left right west east clockwise anticlockwise clock o’clock keycap button flag".split())
_NAMES_A_COLOR = frozenset("white black brown grey gray colour color rainbow".split())


def can_flip(record: Mapping[str, Any]) -> bool:
    """Whether the mirror image of a record matches its captions: it contains no text, and no caption names a side."""
    return record["group"] in _UNWRITTEN and not _NAMES_A_SIDE & _label_words(record)


def can_recolor(record: Mapping[str, Any]) -> bool:
    """Whether a record's image may get another color."""
    return record["group"] not in _FIXED_COLOR and not record.get("tones") and not _NAMES_A_COLOR & _label_words(record)


def _label_words(record: Mapping[str, Any]) -> set[str]:
    return set(record["label"].lower().replace("-", " ").split())


def captions_without_style(record: Mapping[str, Any]) -> list[str]:
    """List the captions that name only the concept."""
    return [text for text in captions({**record, "tones": []}) if not text.endswith(" style")]


def full_captions(record: Mapping[str, Any], style: str | None = None) -> list[str]:
    """List captions with concept, skin tone and style, with and without an article; `style` replaces the record's."""
    found = [text for text in captions({**record, "style": style or record["style"]}) if text.endswith(" style")]
    plain = [text for text in found if not text.startswith("emoji of ")]
    return plain[:2]


def swap_color_words(text: str, one: str, other: str) -> str:
    """Exchange two color words of a caption, for an image whose channels were exchanged."""
    exchange = {one: other, other: one}
    return " ".join(exchange.get(word, word) for word in text.split(" "))


def extract_color_words(record: Mapping[str, Any]) -> list[str]:
    """List the channel colors in a record's name; none for people, whose hair the color describes."""
    words = record["label"].lower().split()
    return [] if record["group"] == "people & body" else [color for color in CHANNEL_COLORS if color in words]


def all_captions(records: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return every caption that the training of the scorer or its evaluation may need."""
    found: set[str] = set()
    for record in records:
        found.update(captions_without_style(record))
        full = [text for style in STYLES for text in full_captions(record, style)]
        found.update(full)
        for one in extract_color_words(record):
            found.update(swap_color_words(text, one, other) for text in full for other in CHANNEL_COLORS if other != one)
    return found

"""Captions for the records of the emoji data set: plain lower-case English built from names and keywords."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

STYLES = ("3d", "flat", "twemoji", "noto")

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


def subject(label: str) -> str:
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
    """Return the words that ask for a style, such as ``"3d style"``; ValueError for an unknown style."""
    if style not in STYLES:
        raise ValueError(f"unknown emoji style {style!r}; expected one of {', '.join(STYLES)}")
    return f"{style} style"


def _with_article(phrase: str, group: str) -> str | None:
    """`phrase` with "a" or "an", or None where an article would read badly (plurals, flags, signs)."""
    last = phrase.split(",")[0].split(" with ")[0].split(" of ")[0].split(" in ")[0].split()[-1]
    plural = last.endswith("s") and not last.endswith(("ss", "us", "is"))
    if group not in _ARTICLE_GROUPS or plural or last in _NO_ARTICLE or not phrase[0].isalpha():
        return None
    # "u" words mostly start with the sound of "you" here (unicorn, unicycle); "um-", "up-" and "un-" do not.
    vowel = phrase[0] in "aeio" or phrase.startswith(("um", "up", "una", "unh"))
    return f"{'an' if vowel else 'a'} {phrase}"


def _tone_phrase(tones: list[str]) -> str:
    """``"medium-dark skin tone"``, ``"light and dark skin tones"`` or the empty string."""
    if not tones:
        return ""
    return f"{tones[0]} skin tone" if len(tones) == 1 else f"{' and '.join(tones)} skin tones"


def _parts(record: Mapping[str, Any]) -> tuple[str, str | None, str, list[str], list[str]]:
    """Subject, subject with article, skin-tone phrase, tags and synonyms of a record, all lower-case."""
    name = subject(record["label"])
    tags = [tag.lower() for tag in record.get("tags", ()) if tag.lower() != name]
    # Two-letter keywords are country codes and chat slang; alone they name nothing.
    synonyms = [synonym.lower() for synonym in record.get("synonyms", ()) if len(synonym) > 2]
    return name, _with_article(name, record["group"]), _tone_phrase(record.get("tones", [])), tags, synonyms


def _join(body: str, *extras: str) -> str:
    return ", ".join([body, *(extra for extra in extras if extra)])


def captions(record: Mapping[str, Any]) -> list[str]:
    """List the typical captions of a record, without duplicates, in a fixed order.

    Args:
        record: an entry of ``records.json``; reads ``label``, ``group``, ``style`` and, where present,
            ``tags``, ``synonyms`` and ``tones``.

    Returns:
        Lower-case strings; the first is the canonical caption (name, skin tone, style). The later ones add
        an article, "emoji of", keywords or synonyms, and leave the style out.

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
    """Draw one caption of a record for training.

    The name is used most of the time, with or without an article, at times with one to three keywords; a
    synonym or keywords alone stand in for it now and then. The style is left out in 30 % of the draws; a
    skin tone is always named.

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
    draw = rng.random()
    if draw < _TAGS_ONLY and len(tags) > 1:
        return _join(*rng.sample(tags, rng.randint(2, min(4, len(tags)))), tone, style)
    if draw < _TAGS_ONLY + _SYNONYM and synonyms:
        return _join(rng.choice(synonyms), tone, style)
    if rng.random() < _EMOJI_OF:
        body = f"emoji of {body}"
    if draw > 1 - _NAME_WITH_TAGS and tags:
        return _join(body, *rng.sample(tags, rng.randint(1, min(3, len(tags)))), tone, style)
    return _join(body, tone, style)


# In these groups nothing is written, and hair, skin and flags are what their colors are.
_UNWRITTEN = frozenset({"animals & nature", "food & drink", "travel & places", "activities", "objects", "smileys & emotion"})
_FIXED_COLOR = frozenset({"people & body", "flags", "components"})
_NAMES_A_SIDE = frozenset("left right west east clockwise anticlockwise clock o’clock keycap button flag".split())
_NAMES_A_COLOR = frozenset("white black brown grey gray colour color rainbow".split())


def can_flip(record: Mapping[str, Any]) -> bool:
    """Whether the mirror image of a record's image fits its captions: nothing is written in it, and no side is named."""
    return record["group"] in _UNWRITTEN and not _NAMES_A_SIDE & _label_words(record)


def can_recolor(record: Mapping[str, Any]) -> bool:
    """Whether a record's image may have another color."""
    return record["group"] not in _FIXED_COLOR and not record.get("tones") and not _NAMES_A_COLOR & _label_words(record)


def _label_words(record: Mapping[str, Any]) -> set[str]:
    return set(record["label"].lower().replace("-", " ").split())

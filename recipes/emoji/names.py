"""The names of all emoji in the words of the training captions, by which a model replaces emoji in prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from recipes.emoji.captions import to_noun_phrase
from recipes.emoji.dataset import TONES, normalize_hexcode
from recipes.emoji.sources import SOURCES, fetch_sources, read_tarball
from vargen.files import cache_folder
from vargen.pipelines.prompts import PromptNames


def emoji_names(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the name of each sequence without variation selectors and skin tones, from emojibase's files by path.

    A skin-tone variant that consists of other code points (two people holding hands) has its own entry.
    """
    names: dict[str, str] = {}
    variants: dict[str, str] = {}
    for entry in json.loads(files["en/data.json"]):
        name = to_noun_phrase(entry["label"])
        names[_characters(normalize_hexcode(entry["hexcode"]))] = name
        for skin in entry.get("skins", ()):
            points = normalize_hexcode(skin["hexcode"]).split("-")
            variants[_characters("-".join(point for point in points if point not in TONES))] = name
    return {**variants, **names}


def _characters(hexcode: str) -> str:
    return "".join(chr(int(point, 16)) for point in hexcode.split("-"))


def write_emoji_names(folder: Path, cache: Path | None = None) -> None:
    """Write the table of the pinned emojibase into a model folder.

    Raises:
        ValueError, OSError: as `fetch_sources`.
    """
    pinned = tuple(source for source in SOURCES if source.style == "")
    (tarball,) = fetch_sources(cache or cache_folder(), pinned).values()
    PromptNames(emoji_names(read_tarball(tarball))).save(folder)

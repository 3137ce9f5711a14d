"""The names of all emoji, in the words of the training captions: the table that a model of emoji reads prompts with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from recipes.emoji.captions import subject
from recipes.emoji.dataset import TONES, normalize_hexcode
from recipes.emoji.sources import SOURCES, fetch_sources, read_tarball
from vargen.files import cache_folder
from vargen.pipelines.prompts import PromptNames


def emoji_names(files: Mapping[str, bytes]) -> dict[str, str]:
    """Name by sequence, without variation selectors and skin tones, of emojibase's files by path.

    A skin-tone variant that is spelled with other code points (two people who hold hands) has an entry of its own.
    """
    names: dict[str, str] = {}
    variants: dict[str, str] = {}
    for entry in json.loads(files["en/data.json"]):
        name = subject(entry["label"])
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

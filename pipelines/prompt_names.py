"""Replacing characters in a prompt by the names that a model was trained with, such as "grinning cat" for "😺".

The table of names belongs to the model and is stored in its folder as `prompt_names.json`. A model of photographs has none, and
uses prompts as typed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vargen.values import short_repr

FILE = "prompt_names.json"
_LARGEST = 2**22  # bytes of a table; one of all emoji has a fiftieth of that
_TONES = frozenset(map(chr, range(0x1F3FB, 0x1F400)))  # skin tones, modifiers of a person or a hand
_UNSEEN = frozenset("\ufe0e\ufe0f\U000e007f")  # present in some spellings of an emoji, absent in others
_LOOSE = _UNSEEN | _TONES | {"\u200d", "\u20e3", *map(chr, range(0xE0020, 0xE0080))}  # modifiers, meaningless without a base
_EMOJI_STYLE, _KEYCAP = "\ufe0f", "\u20e3"
_FIRST_PICTURE = "\u2190"  # characters below it, such as ©, are ordinary text unless followed by the emoji style selector
_TONE_NAME = " skin tone"


@dataclass(frozen=True)
class NormalizedPrompt:
    """A prompt with names inserted (`text`), and the names by the characters that they replaced (`names`), in order."""

    text: str
    names: dict[str, str]


class PromptNames:
    """A table of names for sequences of characters.

    Args:
        names: names by sequence. The sequences have no variation selectors and skin tones, which are recognized anywhere.

    Raises:
        ValueError: unless all names and sequences are non-empty text, and the sequences are not ASCII.
    """

    def __init__(self, names: Mapping[str, str]):
        if not isinstance(names, Mapping):
            raise ValueError(f"prompt_names must map characters to names, got {short_repr(names)}")
        for typed, name in names.items():
            if not (isinstance(typed, str) and isinstance(name, str) and typed and name.strip() and not typed.isascii()):
                raise ValueError(
                    f"prompt_names must map characters that are not ASCII to names, got {short_repr({typed: name})}"
                )
        self.names = dict(names)

    @classmethod
    def read(cls, folder: Path) -> PromptNames | None:
        """Read the table of a model folder; None if it has none.

        Raises:
            ValueError: if the file is damaged; the message names it.
        """
        file = folder / FILE
        if not file.is_file():
            return None
        try:
            if file.stat().st_size > _LARGEST:
                raise ValueError(f"it has more than {_LARGEST} bytes")
            return cls(json.loads(file.read_text("utf-8")))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a table of names: {error}") from error

    def write(self, folder: Path) -> None:
        """Write the table to a folder, one entry per line, sorted."""
        lines = (f"{json.dumps(key, ensure_ascii=False)}:{json.dumps(name)}" for key, name in sorted(self.names.items()))
        (folder / FILE).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(key[:end] for key in self.names for end in range(1, len(key) + 1))

    def reading(self, text: str) -> NormalizedPrompt:
        """Replace sequences in `text` by their names, longest match first."""
        if text.isascii():
            return NormalizedPrompt(text, {})
        found: dict[str, str] = {}
        parts: list[str] = []
        named, at = False, 0  # named: whether the last part is a name
        while at < len(text):
            name, end = self._at(text, at)
            if name is None:
                if named and text[at].isalnum() and not parts[-1].isspace():
                    parts.append(" ")
                parts.append(text[at])
                named, end = named and text[at].isspace(), at + 1
            else:
                while named and parts[-1].isspace():  # consecutive names are separated by a comma only
                    parts.pop()
                if named or (parts and parts[-1].isalnum()):
                    parts.append(", " if named else " ")
                parts.append(name)
                found[text[at:end]], named = name, True
                while end < len(text) and text[end] in _LOOSE:
                    end += 1
            at = end
        return NormalizedPrompt("".join(parts).strip(), found) if found else NormalizedPrompt(text, {})

    def _at(self, text: str, start: int) -> tuple[str | None, int]:
        """Return the name of the longest sequence that begins at `start`, and its end."""
        key, tones, best, end = "", [], None, start
        matched: dict[str, Any] = {}
        for at in range(start, len(text)):
            char = text[at]
            if key and char in _TONES:
                tones.append(char)
            elif key and char in _UNSEEN:
                pass
            elif key + char in self._beginnings:
                key += char
            else:
                break
            if key in self.names:
                best, end = key, at + 1
                matched = {"tones": tuple(dict.fromkeys(tones)), "typed": text[start:end]}
        if best is None or (best[0] < _FIRST_PICTURE and _KEYCAP not in best and _EMOJI_STYLE not in matched["typed"]):
            return None, start
        return ", ".join(part for part in (self.names[best], self._tones(matched["tones"])) if part), end

    def _tones(self, tones: tuple[str, ...]) -> str:
        """Return `"dark skin tone"`, `"light and dark skin tones"` or an empty string, in the words of the table."""
        named = [self.names[tone].removesuffix(_TONE_NAME) for tone in tones if tone in self.names]
        return " and ".join(named) + _TONE_NAME + "s" * (len(named) > 1) if named else ""

"""What a model knows, in words, and prompts near one that is far from it."""

from __future__ import annotations

import difflib
import re

from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.prompts import describe_unread_text

_FEW_WORDS = frozenset("a an and at for from in is of on one or some style that the this to two very which with".split())


class KnownPrompts:
    """The names of what a model was trained on: those of its table of prompt names, or of its classes; there may be none."""

    def __init__(self, pipe: VisualPipeline):
        self._pipe = pipe
        if pipe.is_class_conditional:
            self.names = [names.split(",")[0] for names in pipe.class_names.values()]
        else:
            table = {} if pipe.prompt_names is None else pipe.prompt_names.names
            self.names = sorted({name.replace(":", "") for name in table.values() if not name.startswith("keycap")})
        self._words = {word for name in self.names for word in _split(name)}
        self._words |= set(pipe.config.prompt_styles or ())

    def describe(self) -> str:
        """Return a sentence about what the model knows."""
        if not self.names:
            return ""
        kind = "classes" if self._pipe.is_class_conditional else "emoji by their names"
        short = [name for name in self.names if name.isalpha()] or self.names
        examples = short[len(short) // 6 :: len(short) // 4 or 1][:3]
        return f"It knows {len(self.names):,} {kind}, such as {' and '.join(examples[-2:])}."

    def unread(self, prompt: str) -> str:
        """Return sentences about what the text encoder does not read of a prompt; empty if it reads all."""
        if self._pipe.is_class_conditional or self._pipe.tokenizer is None:
            return ""
        text = self._pipe.normalize_prompt(prompt).text
        reasons = describe_unread_text(self._pipe.tokenizer, text, self._pipe.max_caption_tokens)
        return " ".join(f"{each[0].upper()}{each[1:]}." for each in reasons)

    def near(self, prompt: str, count: int = 4) -> list[str]:
        """Return names near a prompt of which the model knows no word; empty for one that is not far from what it knows."""
        words = _split(self._pipe.normalize_prompt(prompt).text)
        if not self.names or not words or any(word in self._words for word in words):
            return []
        alike = [each for word in words for each in difflib.get_close_matches(word, self._words, count, 0.6)]
        found = [name for each in alike for name in self.names if each in _split(name)]
        short = [name for name in self.names if name.isalpha()] or self.names
        spread = short[len(prompt) % 7 :: len(short) // count or 1]
        return list(dict.fromkeys([*sorted(found, key=len), *spread]))[:count]


def _split(text: str) -> list[str]:
    """Return the words that mean something, in the singular."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    return [word.removesuffix("s") if len(word) > 3 else word for word in words if word not in _FEW_WORDS]

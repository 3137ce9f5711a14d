"""Captions of the emoji data for the scorer, their features computed once, and which of them belong together.

Shape suffixes: M captions, P concepts, D text features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from recipes.emoji.captions import STYLES, captions
from vargen.files import atomic_file
from vargen.models.image_text import pooled_features
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.weight_files import weights_digest

Record = dict[str, Any]
COLOURS = ("red", "green", "blue")  # in the order of the channels


class CaptionTable:
    """Mean-pooled unit features float16 `[M, D]` of distinct captions, kept in a file.

    Args:
        path: of the file; made anew when captions or encoder differ.
        texts: captions; repeated ones count once.
        encoder_folder: holds `text_encoder/` and `tokenizer/`.
    """

    def __init__(self, path: Path, texts: Iterable[str], encoder_folder: Path, device: torch.device):
        self.texts = sorted(set(texts))
        self.row = {text: number for number, text in enumerate(self.texts)}
        encoder = MiniLMTextEncoder.from_pretrained(encoder_folder / "text_encoder").to(device).eval()
        made_of = hashlib.sha256("\n".join([weights_digest(encoder), *self.texts]).encode()).hexdigest()
        if path.is_file():
            with np.load(path) as kept:
                if str(kept["made_of"]) == made_of:
                    self.features = torch.from_numpy(kept["features"])
                    return
        tokenizer = AutoTokenizer.from_pretrained(encoder_folder / "tokenizer")
        self.features = pooled_features(encoder, tokenizer, self.texts).half()
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, features=self.features.numpy(), made_of=np.array(made_of))

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """float32 `[len(texts), D]`."""
        return self.features[[self.row[text] for text in texts]].float()


def without_style(record: Record) -> list[str]:
    """Captions that name the concept alone."""
    return [text for text in captions({**record, "tones": []}) if not text.endswith(" style")]


def full_captions(record: Record, style: str | None = None) -> list[str]:
    """Captions that name concept, skin tone and style, with and without an article; in another style if one is given."""
    found = [text for text in captions({**record, "style": style or record["style"]}) if text.endswith(" style")]
    plain = [text for text in found if not text.startswith("emoji of ")]
    return plain[:2]


def swap_color_words(text: str, one: str, other: str) -> str:
    """`text` with two colour words exchanged, as the picture's channels are."""
    exchange = {one: other, other: one}
    return " ".join(exchange.get(word, word) for word in text.split(" "))


def colours_of(record: Record) -> list[str]:
    """Colour words of the name that a change of channels changes; none for people, whose hair is what is red."""
    words = record["label"].lower().split()
    return [] if record["group"] == "people & body" else [colour for colour in COLOURS if colour in words]


def all_captions(records: Sequence[Record]) -> set[str]:
    """Every caption that training or its evaluation may ask for."""
    found: set[str] = set()
    for record in records:
        found.update(without_style(record))
        own = [text for style in STYLES for text in full_captions(record, style)]
        found.update(own)
        for one in colours_of(record):
            found.update(swap_color_words(text, one, other) for text in own for other in COLOURS if other != one)
    return found

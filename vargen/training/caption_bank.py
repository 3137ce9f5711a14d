"""Caption features, computed once per text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from vargen.models.condition import Condition
from vargen.models.text_encoder import MiniLMTextEncoder

_TEXTS = 16  # texts per encoder batch
_MOST_TEXTS = 60_000  # texts with features in memory: half a gigabyte


class CaptionBank:
    """Caption features, computed once per text: the `Condition` of texts, padded to a fixed number of rows.

    Args:
        encoder_folder: contains `text_encoder/` and `tokenizer/`. rows: P; longer captions are truncated.
    """

    def __init__(self, encoder_folder: Path, rows: int, device: torch.device):
        self.encoder = MiniLMTextEncoder.from_pretrained(encoder_folder / "text_encoder").to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(encoder_folder / "tokenizer")
        self.rows, self.device = rows, device
        self.kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Condition:
        wanted = [text for text in dict.fromkeys(texts) if text not in self.kept]
        if len(self.kept) + len(wanted) > _MOST_TEXTS:
            self.kept.clear()
            wanted = list(dict.fromkeys(texts))
        for start in range(0, len(wanted), _TEXTS):
            part = wanted[start : start + _TEXTS]
            # A fixed batch shape: otherwise the last bits of a text's features would depend on the other texts of the
            # batch, and a resumed run would differ from an uninterrupted one.
            full = part + [part[0]] * (_TEXTS - len(part))
            options = {"padding": "max_length", "truncation": True, "max_length": self.rows, "return_tensors": "pt"}
            encoded = self.tokenizer(full, **options).to(self.device)
            with torch.autocast(self.device.type, enabled=False):  # features must not depend on the caller's autocast
                found = self.encoder(encoded.input_ids, encoded.attention_mask)
            for text, rows, count in zip(part, found, encoded.attention_mask.sum(1).tolist(), strict=False):
                self.kept[text] = rows[:count].half()
        width = self.kept[texts[0]].shape[1]
        embeds = torch.zeros(len(texts), self.rows, width, device=self.device)
        mask = torch.zeros(len(texts), self.rows, dtype=torch.bool, device=self.device)
        for i, text in enumerate(texts):
            rows = self.kept[text]
            embeds[i, : len(rows)], mask[i, : len(rows)] = rows.float(), True
        return Condition(caption_embeds=embeds, caption_mask=mask)

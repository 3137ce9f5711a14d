"""Captioned images, the training data of the networks that users train for their own model, and features of the captions."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vargen.folders.tokenizers import load_tokenizer
from vargen.models.guidance import Condition
from vargen.models.text_encoder import MiniLMTextEncoder

Record = dict[str, Any]
T = TypeVar("T")
IMAGES, CAPTIONS = "images.npy", "captions.jsonl"
_VALIDATION_EVERY = 20  # interval of validation images among those without a `split`
_TEXTS = 16  # texts per batch of the text encoder on a CPU
_GPU_TEXTS = 128
_MAX_TEXTS = 60_000  # texts with features in memory: half a gigabyte


@dataclass(frozen=True)
class CaptionedImages:
    """Images and a record for each. A data set with its own kind of captions overrides the methods.

    Attributes:
        images: uint8 `[N, size, size, 3]`, may be memory-mapped.
        records: N dictionaries with `captions`, of which evaluations use the first; `split`; and, if some images are to be
            sampled more often as prompts of a drafter, `weight`.
    """

    images: np.ndarray
    records: list[Record]

    def indices(self, split: str) -> np.ndarray:
        """Return the positions (int64) of the records of ``"train"`` or ``"validation"``."""
        return np.array([i for i, r in enumerate(self.records) if r["split"] == split], dtype=np.int64)

    def captions(self, i: int) -> list[str]:
        """Return the captions of image i; evaluations use the first."""
        return self.records[i]["captions"]

    def sample_caption(self, i: int, rng: random.Random) -> str:
        """Sample a caption of image i for training; equal states of `rng` give equal captions."""
        return rng.choice(self.captions(i))


def load_captioned_images(folder: Path) -> CaptionedImages:
    """Load a folder of `images.npy` and `captions.jsonl`.

    The images are uint8 `[N, size, size, 3]` and stay on disk (memory-mapped). The captions are one JSON object per image, in
    the same order, with `caption`, or several `captions`, and optionally the other fields listed in `CaptionedImages`. Every
    twentieth image without a `split` is held out for validation.
    """
    images = _open_images(folder)
    records = []
    for number, line in enumerate((folder / CAPTIONS).read_text("utf-8").splitlines()):
        try:
            record = json.loads(line)
            texts = record.pop("captions", None) or [record.pop("caption")]
        except (ValueError, KeyError, AttributeError, TypeError):
            texts = []
        if not texts or not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            form = '{"caption": "a red apple"}'
            raise ValueError(f"{folder / CAPTIONS}: line {number + 1} must be like {form}, got {line[:80]!r}")
        split = "train" if (number + 1) % _VALIDATION_EVERY else "validation"
        records.append({"split": split, **record, "captions": texts})
        if records[-1]["split"] not in ("train", "validation"):
            raise ValueError(f"{folder / CAPTIONS}: line {number + 1}: split must be 'train' or 'validation'")
    square = images.ndim == 4 and images.shape[1] == images.shape[2] and images.shape[3] == 3
    if not square or images.dtype != np.uint8 or len(images) != len(records):
        raise ValueError(
            f"{folder}: {IMAGES} must be uint8 [N, size, size, 3] and fit its {len(records)} records, "
            f"got {images.dtype}{list(images.shape)}"
        )
    if not {"train", "validation"} <= {record["split"] for record in records}:
        raise ValueError(
            f"{folder / CAPTIONS}: both splits must have images; every twentieth without a split is for validation"
        )
    return CaptionedImages(images, records)


def _open_images(folder: Path) -> np.ndarray:
    """Memory-map `images.npy` of a folder read-only; FileNotFoundError if a file of the data set is missing."""
    for name in (IMAGES, CAPTIONS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing; a data set is a folder with both {IMAGES} and {CAPTIONS}")
    try:
        return np.load(folder / IMAGES, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:  # replaced, because numpy's message may recommend unpickling
        raise ValueError(f"{folder}: {IMAGES} is damaged ({type(error).__name__})") from None


def take_evenly(members: Sequence[T], count: int) -> list[T]:
    """Return at most `count` members, evenly spaced."""
    if len(members) <= count:
        return list(members)
    return [members[len(members) * place // count] for place in range(count)]


def to_pixels(images: np.ndarray, device: torch.device) -> Tensor:
    """Convert uint8 `[B, Y, X, 3]` to float32 `[B, 3, Y, X]` in [-1, 1]."""
    # contiguous: group norm and small convolutions are six times slower on a CPU in channels-last layout
    moved = torch.from_numpy(np.ascontiguousarray(images)).to(device).permute(0, 3, 1, 2)
    return moved.contiguous().float() / 127.5 - 1


class CaptionBank:
    """Caption features, computed once per text: the `Condition` of texts, padded to a fixed number of rows.

    Args:
        encoder_folder: contains `text_encoder/` and `tokenizer/`. rows: P; longer captions are truncated.
    """

    def __init__(self, encoder_folder: Path, rows: int, device: torch.device):
        self.encoder = MiniLMTextEncoder.from_pretrained(encoder_folder / "text_encoder", dtype=torch.float32).to(device).eval()
        self.tokenizer = load_tokenizer(encoder_folder / "tokenizer", "BertTokenizerFast")
        self.rows, self.device = rows, device
        self.features: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Condition:
        count = _TEXTS if self.device.type == "cpu" else _GPU_TEXTS
        missing = [text for text in dict.fromkeys(texts) if text not in self.features]
        if len(self.features) + len(missing) > _MAX_TEXTS:
            self.features.clear()
            missing = list(dict.fromkeys(texts))
        for start in range(0, len(missing), count):
            part = missing[start : start + count]
            # A fixed batch shape: otherwise the last bits of a text's features would depend on the other texts of the
            # batch, and a resumed run would differ from an uninterrupted one.
            full = part + [part[0]] * (count - len(part))
            options = {"padding": "max_length", "truncation": True, "max_length": self.rows, "return_tensors": "pt"}
            encoded = self.tokenizer(full, **options).to(self.device)
            with torch.autocast(self.device.type, enabled=False):  # features must not depend on the caller's autocast
                outputs = self.encoder(encoded.input_ids, encoded.attention_mask)
            for text, output, length in zip(part, outputs.half(), encoded.attention_mask.sum(1).tolist(), strict=False):
                self.features[text] = output[:length].clone()  # without the padding
        rows = [self.features[text] for text in texts]
        counts = torch.tensor([len(each) for each in rows], device=self.device)
        mask = torch.arange(self.rows, device=self.device) < counts[:, None]
        embeds = torch.zeros(len(rows), self.rows, rows[0].shape[1], device=self.device)
        embeds[mask] = torch.cat([each.float() for each in rows])  # autocast on a CPU joins no half-precision rows
        return Condition(caption_embeds=embeds, caption_mask=mask)

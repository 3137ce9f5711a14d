"""Prompts to what a text-conditioned LlamaGen was trained on: cleaned text, features padded on the left."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from vargen.compat import tokenized, tokenizer_lock

logger = logging.getLogger("vargen")


def left_pad(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move valid rows to the end and clear the padding.

    Args:
        features: `[B, P, C]`, padded on the right. mask: bool `[B, P]`, True where valid.

    Returns:
        Features `[B, P, C]` with valid rows last in their order, padding zero; and their mask.
    """
    P = mask.shape[1]
    padding = P - mask.sum(1, keepdim=True)
    index = torch.arange(P, device=mask.device) - padding
    aligned = features.gather(1, index.clamp_min(0)[..., None].expand_as(features))
    valid = index >= 0
    return aligned * valid[..., None].to(features.dtype), valid


def warn_if_truncated(tokenizer: Any, prompts: list[str], rows: int) -> None:
    """Warn for every prompt longer than `rows` tokens, with how many are lost and the first words of what is."""
    for text in prompts:
        ids = tokenized(tokenizer, text, truncation=False, add_special_tokens=True, verbose=False)["input_ids"]
        if len(ids) > rows:
            with tokenizer_lock:
                kept = tokenizer.decode(ids[:rows], skip_special_tokens=True)
            logger.warning(
                "the prompt has %d tokens and the model reads %d: the last %d are ignored. It was cut after %r",
                len(ids), rows, len(ids) - rows, kept[-60:],
            )  # fmt: skip


_LATIN_ENDS = "\u0250"  # letters before it are Latin; an uncased tokenizer reads them without their accents
_GREEK = "\u0370", "\u03ff"  # single letters of it are signs that English texts use


def find_unreadable_words(tokenizer: Any, prompt: str) -> list[str]:
    """Words of another script that a text encoder gets nothing of: unknown to its tokenizer, or read letter by letter.

    Each once, in order. A tokenizer that knows a script has pieces of several letters for its words.
    """
    found: list[str] = []
    for word in dict.fromkeys(prompt.split()):
        if word.isascii() or (len(word) == 1 and _GREEK[0] <= word <= _GREEK[1]):
            continue
        ids = tokenized(tokenizer, word, add_special_tokens=False, verbose=False)["input_ids"]
        with tokenizer_lock:
            pieces = [piece.removeprefix("##").strip("\u2581") for piece in tokenizer.convert_ids_to_tokens(ids)]
        unknown = [number == tokenizer.unk_token_id for number in ids]
        single = [len(piece) == 1 and piece >= _LATIN_ENDS and piece.isalpha() for piece in pieces]
        lost = sum(map(max, unknown, single))
        if 2 * lost > sum(not_read or any(map(str.isalnum, piece)) for not_read, piece in zip(unknown, pieces, strict=True)):
            found.append(word.strip(_PUNCTUATION) or word)
    return list(dict.fromkeys(found))


_PUNCTUATION = "\"'`.,;:!?()[]{}«»„“”‘’…、。，！？"


def describe_unreadable_words(tokenizer: Any, prompt: str) -> str | None:
    """A sentence that names the `find_unreadable_words`; None where there are none."""
    words = find_unreadable_words(tokenizer, prompt)
    if not words:
        return None
    named = ", ".join(f'"{word[:40]}"' for word in words[:5]) + (" and more" if len(words) > 5 else "")
    return f"the text encoder cannot read {named}: English is what the model reads"


def clean_caption(text: str) -> str:
    """The DeepFloyd caption cleaner, twice, as LlamaGen's text models were trained (through diffusers).

    Raises:
        ImportError: without ftfy and beautifulsoup4.
    """
    try:
        import bs4  # noqa: F401
        import ftfy  # noqa: F401
    except ImportError as error:
        raise ImportError("clean_prompt=True needs two packages: pip install ftfy beautifulsoup4") from error
    from diffusers.pipelines.pixart_alpha import PixArtAlphaPipeline

    for _ in range(2):
        text = PixArtAlphaPipeline._clean_caption(PixArtAlphaPipeline, text)
    return text.strip()

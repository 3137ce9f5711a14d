"""Prompts to what a text-conditioned LlamaGen was trained on: cleaned text, features padded on the left."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("vargen")


def align_left_padded(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
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


def warn_truncated(tokenizer: Any, prompts: list[str], rows: int) -> None:
    """Warn for every prompt longer than `rows` tokens, with how many are lost and the first words of what is."""
    for text in prompts:
        ids = tokenizer(text, truncation=False, add_special_tokens=True, verbose=False)["input_ids"]
        if len(ids) > rows:
            kept = tokenizer.decode(ids[:rows], skip_special_tokens=True)
            logger.warning(
                "the prompt has %d tokens and the model reads %d: the last %d are ignored. It was cut after %r",
                len(ids), rows, len(ids) - rows, kept[-60:],
            )  # fmt: skip


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

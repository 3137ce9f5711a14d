"""Example tokens for lookup drafters: tokens of training images, in `examples.safetensors` of a model folder.

They affect only speed: exact rules sample from the model's distribution whatever the examples are.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "examples.safetensors"
_LARGEST = 2**26  # bytes of a file; the packaged one has a sixteenth of that


def read_examples(folder: Path) -> Tensor | None:
    """Read the example tokens, integers `[M, N]`, of a model folder; None if it has none.

    Raises:
        ValueError: if the file is damaged; the message names it.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    if file.stat().st_size > _LARGEST:
        raise ValueError(f"{file} has more than {_LARGEST} bytes: keep fewer examples")
    try:
        tokens = load_file(file)["tokens"]
    except (SafetensorError, KeyError, OSError) as error:
        raise ValueError(f"{file} holds no examples: {error}; remove it, or write another") from error
    if tokens.dim() != 2 or not len(tokens) or tokens.dtype not in (torch.int16, torch.int32, torch.int64):
        given = f"{tokens.dtype} {list(tokens.shape)}"
        raise ValueError(f"{file} must hold integers [pictures, tokens], got {given}")
    return tokens


def check_examples(tokens: Tensor, vocab: int, count: int) -> None:
    """Raise ValueError unless examples fit a model with `vocab` tokens in the vocabulary and `count` tokens per image."""
    if tokens.shape[1] != count or int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise ValueError(
            f"examples must be [pictures, {count}] of tokens from 0 to {vocab - 1}, got {list(tokens.shape)} of "
            f"{int(tokens.min())} to {int(tokens.max())}"
        )


def write_examples(tokens: Tensor, folder: Path) -> None:
    """Write example tokens `[M, N]` to a folder, as 16-bit integers if they fit."""
    small = torch.int16 if int(tokens.max()) < 2**15 else torch.int32
    save_file({"tokens": tokens.to("cpu", small).contiguous()}, folder / FILE)

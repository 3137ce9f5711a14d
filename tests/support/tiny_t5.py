"""A tiny T5 encoder with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel


def save_text_encoder(folder: Path, width: int) -> Path:
    """Save it with a tokenizer of three words, as transformers does."""
    torch.manual_seed(0)
    shape = {"d_ff": 32, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 6}
    T5EncoderModel(T5Config(d_model=width, **shape)).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1, "a": 2, "red": 3, "apple": 4}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    return folder

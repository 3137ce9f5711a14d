"""Vocabularies in tiktoken's format, as a `tokenizer.json` of the same tokens: those of Emu3.5, whose own class is code.

A line holds the bytes of a token in base64 and its rank, which is its id; text is merged pair by pair in the order of ranks.
The special tokens follow: the ones that the class has, then those of a second file, one a line.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from vargen.folders.json_files import INCOMPLETE, expect, read_data

TIKTOKEN_FILE, VISION_FILE = "emu3.tiktoken", "emu3_vision_tokens.txt"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
# How text is split before tokens are merged: contractions, words, single digits, punctuation and spaces, as in Qwen.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MAX_BYTES = 2**23  # of a file
_MAX_TOKEN = 256  # bytes of a token, which has as many places where it can be split


def read_tiktoken(folder: Path) -> dict[str, Any]:
    """Return the content of a `tokenizer.json` with the tokens of the two files in a folder, of the same ids.

    Raises:
        ValueError: for a missing or damaged file, and ranks that are not 0, 1, 2 and so on.
    """
    file, ranks = folder / TIKTOKEN_FILE, {}
    for line in read_data(file, _MAX_BYTES).splitlines():
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{file} must have a token in base64 and its rank in each line, got {line[:80]!r}") from error
    order = sorted(ranks, key=ranks.__getitem__)
    expect(sorted(ranks.values()) == [*range(len(ranks))], "ranks", len(ranks), file, "each number from 0 once")
    expect(max(map(len, order), default=0) <= _MAX_TOKEN, "a token", order[-1:], file, f"{_MAX_TOKEN} bytes at most")
    expect(all(bytes([each]) in ranks for each in range(256)), "tokens", len(ranks), file, "one for each byte, and others")
    special = [*_SPECIAL, *_read_lines(folder / VISION_FILE)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    characters = _byte_characters()
    names = {token: "".join(characters[byte] for byte in token) for token in order}
    split = {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Isolated", "invert": False}
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    merges = [
        [names[token[:place]], names[token[place:]]]
        for token in order
        for place in range(1, len(token))
        if token[:place] in ranks and token[place:] in ranks
    ]
    vocab = {names[token]: rank for rank, token in enumerate(order)}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": text, "special": True, **flags} for number, text in enumerate(special, len(ranks))
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, by_byte]},
        "decoder": by_byte,
        # A word that is a token is that token, whatever its merges are.
        "model": {"type": "BPE", "ignore_merges": True, "vocab": vocab, "merges": merges},
    }


def _read_lines(file: Path) -> list[str]:
    """Return the special tokens in a file, one a line."""
    found = [line.strip() for line in read_data(file, _MAX_BYTES).decode("utf-8", "replace").splitlines()]
    found = [line for line in found if line]
    if not found or len({*found, *_SPECIAL}) < len(found) + len(_SPECIAL):
        raise ValueError(f"{file} must have a special token in each line, none of them twice; {INCOMPLETE}")
    return found


def _byte_characters() -> list[str]:
    """Return the character for each byte in byte-level vocabularies: its own, or a later one where that is not visible."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    later = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(later)) for byte in range(256)]

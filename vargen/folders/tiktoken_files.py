"""Vocabularies in tiktoken's format, as a `tokenizer.json` of the same tokens: of models whose own tokenizer class is code.

A line holds the bytes of a token in base64 and its rank, which is its id; text is merged pair by pair in the order of ranks.
The special tokens follow: the ones that the class has, then those of a second file, one a line.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from vargen.folders.json_files import INCOMPLETE, expect, read_data

_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_VISION = (
    *(f"<|{name}_{end}|>" for name in ("object_ref", "box", "quad", "vision") for end in ("start", "end")),
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>",
    *(f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix", "pad")), "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
# Special tokens that the class of a vocabulary has, by the name of its file: that of Emu3.5, and of MammothModa2.
VOCABULARIES: dict[str, tuple[str, ...]] = {
    "emu3": (*_QWEN, *(f"<|extra_{number}|>" for number in range(205))),
    "mammothu": (
        *_QWEN, *_QWEN_VISION, *(f"<|extra_{number}|>" for number in range(181)),
        *(f"<|extra_margin_{number}|>" for number in range(218)),
        "<|endofline|>", "<|endoffile|>", "<|gen_placeholder|>", "<|useless token|>", "<|beginoftext|>",
    ),
}  # fmt: skip
# How text is split before tokens are merged: contractions, words, single digits, punctuation and spaces, as in Qwen.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MAX_BYTES = 2**23  # of a file
_MAX_TOKEN = 256  # bytes of a token, which has as many places where it can be split


def find_tiktoken(folder: Path) -> Path | None:
    """Return the vocabulary of a known class in a folder; None if there is none."""
    return next((file for name in VOCABULARIES if (file := folder / f"{name}.tiktoken").is_file()), None)


def read_tiktoken(file: Path) -> dict[str, Any]:
    """Return the content of a `tokenizer.json` with the tokens of a vocabulary, and of the file of special tokens beside it.

    Raises:
        ValueError: for a missing or damaged file, and ranks that are not 0, 1, 2 and so on.
    """
    ranks: dict[bytes, int] = {}
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
    known = VOCABULARIES[file.stem]
    special = [*known, *_read_lines(file.with_name(f"{file.stem}_vision_tokens.txt"), known)]
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


def _read_lines(file: Path, known: tuple[str, ...]) -> list[str]:
    """Return the special tokens in a file, one a line, beside those that are known."""
    found = [line.strip() for line in read_data(file, _MAX_BYTES).decode("utf-8", "replace").splitlines()]
    found = [line for line in found if line]
    if not found or len({*found, *known}) < len(found) + len(known):
        raise ValueError(f"{file} must have a special token in each line, none of them twice; {INCOMPLETE}")
    return found


def _byte_characters() -> list[str]:
    """Return the character for each byte in byte-level vocabularies: its own, or a later one where that is not visible."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    later = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(later)) for byte in range(256)]

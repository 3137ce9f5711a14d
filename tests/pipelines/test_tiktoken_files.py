"""Vocabularies in tiktoken's format: the ids of the official program, special tokens, damaged files, and time."""

from __future__ import annotations

import base64
import json
import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vargen.folders.tiktoken_files import find_tiktoken, read_tiktoken
from vargen.folders.tokenizers import TokenizerFolder, load_tokenizer

regex = pytest.importorskip("regex")
PATTERN = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
TIKTOKEN_FILE, VISION_FILE = "emu3.tiktoken", "emu3_vision_tokens.txt"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]
# Ids of the released MammothModa2, after a vocabulary of 151,643 tokens.
MAMMOTH = {"<|im_end|>": 151645, "<|object_ref_start|>": 151646, "<|vision_start|>": 151652, "<|vision_end|>": 151653,
           "<|image_pad|>": 151655, "<|video_pad|>": 151656, "<tool_call>": 151657, "<|fim_pad|>": 151662,
           "<|file_sep|>": 151664, "<|extra_0|>": 151665, "<|extra_margin_0|>": 151846, "<|extra_margin_217|>": 152063,
           "<|endofline|>": 152064, "<|beginoftext|>": 152068, "<|image end|>": 152071,
           "<|visual token 000000|>": 152072}  # fmt: skip
VISION = ["<|image token|>", "<|image start|>", "<|image end|>", "<|visual token 000000|>", "<|visual token 000001|>"]
TEXTS = [
    "A red apple's 64*64 ünïcödé é", "  tabs\t and\n\n lines \r\n", "你好, 世界!! 12345", "aaaa aaaaaaa abababab", "",
    "<|image start|>64*64<|image token|><|visual token 000001|>", "USER: the the<|extra_203|>then", "🙂 don't DON'T", " ",
    "cafe\u0301", "qzx qzxa",
]  # fmt: skip


def make_ranks(merges: int = 150) -> list[bytes]:
    """Single bytes in another order than that of their values, then the merges of pairs that are frequent in texts."""
    tokens = [bytes([each]) for each in random.Random(0).sample(range(256), 256)]
    text = " ".join(TEXTS).encode() + b" the red apple and the green apple in the theater" * 3
    parts = [text[i : i + 1] for i in range(len(text))]
    for _ in range(merges):
        pairs = [a + b for a, b in pairwise(parts) if len(a + b) < 20]
        best = max(sorted({*pairs} - {*tokens}), key=pairs.count)
        tokens.append(best)
        joined: list[bytes] = []
        for part in parts:
            if joined and joined[-1] + part == best:
                joined[-1] = best
            else:
                joined.append(part)
        parts = joined
    return [*tokens, b"qzx"]  # which no merges make


def write_files(folder: Path, tokens: list[bytes], vision: list[str] = VISION, file: str = TIKTOKEN_FILE) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / file).write_text("".join(lines))
    (folder / file.replace(".tiktoken", "_vision_tokens.txt")).write_text("\n".join([*vision, ""]))
    return folder


def official_ids(tokens: list[bytes], text: str) -> list[int]:
    """Ids by the definition: special tokens first, words by the pattern, then the pair whose token is first, the leftmost."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    names = [*SPECIAL, *VISION]
    found = []
    for piece in regex.split("(" + "|".join(map(regex.escape, names)) + ")", unicodedata.normalize("NFC", text)):
        if piece in names:
            found.append(len(tokens) + names.index(piece))
            continue
        for word in regex.findall(PATTERN, piece):
            if word.encode() in ranks:
                found.append(ranks[word.encode()])
                continue
            parts = [bytes([each]) for each in word.encode()]
            while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
                _, i = min(pairs)
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            found += [ranks[part] for part in parts]
    return found


def test_ids_are_the_official_ones(tmp_path: Path) -> None:
    tokens = make_ranks()
    tokenizer = load_tokenizer(write_files(tmp_path, tokens), "PreTrainedTokenizerFast")
    generator = random.Random(1)
    pieces = [*TEXTS, *" .,!?\n*'0123456789abcdefgh", "the", "apple", *SPECIAL[:4], *VISION]
    for text in [
        "".join(map(chr, range(0x21, 0x800))),
        *TEXTS,
        *("".join(generator.choices(pieces, k=12)) for _ in range(200)),
    ]:
        assert tokenizer(text)["input_ids"] == official_ids(tokens, text), text
    assert len(tokenizer) == len(tokens) + len(SPECIAL) + len(VISION)
    assert tokenizer.convert_tokens_to_ids("<|extra_203|>") == len(tokens) + 206
    assert tokenizer.decode(tokenizer("the red apple é")["input_ids"]) == "the red apple é"


def test_ids_of_mammothmoda2_are_the_released_ones(tmp_path: Path) -> None:
    tokens = make_ranks(10)
    order = ["<|image token|>", "<|image start|>", "<|image end|>", *VISION[3:]]
    folder = write_files(tmp_path, tokens, order, "mammothu.tiktoken")
    tokenizer = load_tokenizer(folder, "PreTrainedTokenizerFast")
    found = {name: tokenizer.convert_tokens_to_ids(name) - len(tokens) + 151_643 for name in MAMMOTH}
    assert found == MAMMOTH
    assert find_tiktoken(folder) == folder / "mammothu.tiktoken" and find_tiktoken(tmp_path / "other") is None


def test_it_is_saved_as_the_tokenizer_json_that_opens_first(tmp_path: Path) -> None:
    tokens = make_ranks(40)
    tokenizer = load_tokenizer(write_files(tmp_path, tokens), "PreTrainedTokenizerFast")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / TIKTOKEN_FILE).write_text("damaged")
    again = load_tokenizer(tmp_path, "PreTrainedTokenizerFast")
    assert all(again(text)["input_ids"] == official_ids(tokens, text) for text in TEXTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines, "YWJj"], "in each line, got b'YWJj'"),
        (lambda lines: [*lines, "?? 256"], "in each line"),
        (lambda lines: [*lines, "YWJj x"], "in each line"),
        (lambda lines: [*lines, "YWJj 300"], "each number from 0 once"),
        (lambda lines: [*lines, "YWJj -1"], "each number from 0 once"),
        (lambda lines: [*lines, lines[3].split()[0] + " 256"], "each number from 0 once"),
        (lambda lines: [*lines, base64.b64encode(b"a" * 300).decode() + " 256"], "256 bytes at most"),
        (lambda lines: lines[:-1], "one for each byte"),
        (lambda lines: [], "one for each byte"),
    ],
)
def test_damaged_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    write_files(tmp_path, make_ranks(0)[:256])
    file = tmp_path / TIKTOKEN_FILE
    file.write_text("\n".join(change(file.read_text().splitlines())))
    with pytest.raises(ValueError, match=f"{TIKTOKEN_FILE} .*{message}"):
        TokenizerFolder(tmp_path, "PreTrainedTokenizerFast")


def test_special_tokens_must_be_there_once(tmp_path: Path) -> None:
    for vision in ([], ["<|a|>", "<|a|>"], ["<|extra_3|>"]):
        with pytest.raises(ValueError, match=f"{VISION_FILE} must have a special token in each line, none of them twice"):
            read_tiktoken(write_files(tmp_path, make_ranks(0), vision) / TIKTOKEN_FILE)
    (tmp_path / VISION_FILE).unlink()
    with pytest.raises(ValueError, match=f"{VISION_FILE} is missing"):
        read_tiktoken(tmp_path / TIKTOKEN_FILE)


def test_errors_name_the_file_with_the_parts(tmp_path: Path) -> None:
    """And not the vocabulary that is read beside it."""
    content = {"model": {"type": "Markov", "vocab": {}}}
    for name, text in (("tokenizer.json", json.dumps(content)), ("vocab.json", "{}"), ("merges.txt", "a b")):
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json has a model of type: 'Markov'"):
        TokenizerFolder(tmp_path, "CLIPTokenizerFast")

"""Folders as people have them: in shards, as a variant, in the hub's cache, on a read-only drive, with files beside, ..."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limited_process import open_and_sample
from safetensors.torch import load_file, save_file
from tiny_language_models import make_janus, needs_janus
from tiny_models import text_pipeline, text_var_pipeline

from vargen import open_pipeline


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int]]]:
    """Saved models by family, each with the tokens of an image."""
    root = tmp_path_factory.mktemp("saved")
    text_pipeline().save_pretrained(root / "llamagen")
    text_var_pipeline().save_pretrained(root / "var")
    for part in make_janus():
        part.save_pretrained(root / "janus")
    return {name: (root / name, open_and_sample(str(root / name))) for name in ("llamagen", "var", "janus")}


def rename_weights(folder: Path, rename: Callable[[str], str]) -> None:
    for file in list(folder.rglob("*.safetensors")):
        file.rename(file.with_name(rename(file.name)))


def split_weights(folder: Path) -> None:
    """Store each network in two files with an index."""
    for file in list(folder.rglob("*.safetensors")):
        weights, index = load_file(file), {}
        for number in (0, 1):
            part = dict(list(weights.items())[number::2])
            shard = file.with_name(f"{file.stem}-{number + 1:05}-of-00002.safetensors")
            save_file(part, shard, {"format": "pt"})
            index |= dict.fromkeys(part, shard.name)
        file.with_name(f"{file.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        file.unlink()


def mark_byte_order(folder: Path) -> None:
    for file in folder.rglob("*.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def link_to_blobs(folder: Path) -> None:
    """As the hub's cache stores files."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(each for each in list(folder.rglob("*")) if each.is_file()):
        file.rename(blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), file.parent))


def make_read_only(folder: Path) -> None:
    for place in (*folder.rglob("*"), folder):
        place.chmod(0o555 if place.is_dir() else 0o444)


def add_foreign_files(folder: Path) -> None:
    names = ("README.md", ".gitattributes", "qwen.tiktoken", "words.bpe", "consolidated.00.pth", "modeling.py", "größe.txt")
    for place in (folder, *(each for each in folder.iterdir() if each.is_dir())):
        for name in names:
            (place / name).write_bytes(b"\xff other")
        (place / "a folder").mkdir()
        (place / "loop").symlink_to(folder)


KINDS: dict[str, Callable[[Path], Any]] = {
    "in shards": split_weights,
    "a variant": lambda folder: rename_weights(folder, lambda name: name.replace(".safetensors", ".fp16.safetensors")),
    "capital suffixes": lambda folder: rename_weights(folder, lambda name: name.replace(".safetensors", ".SafeTensors")),
    "shards in capitals": lambda folder: (
        split_weights(folder), rename_weights(folder, lambda name: name.upper()),
    ),
    "a byte order mark": mark_byte_order,
    "links to blobs": link_to_blobs,
    "read-only": make_read_only,
    "files of others": add_foreign_files,
}  # fmt: skip


@needs_janus
@pytest.mark.parametrize("family", ["llamagen", "var", "janus"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_any_kind_generates_the_same(saved: Any, family: str, kind: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved[family][0], tmp_path / "模型 é" / "my model"))
    KINDS[kind](folder)
    before = {file: file.stat().st_mtime_ns for file in folder.parent.rglob("*")}
    assert open_and_sample(str(folder)) == saved[family][1]
    assert before == {file: file.stat().st_mtime_ns for file in folder.parent.rglob("*")}, "nothing is written there"


@needs_janus
def test_a_vocabulary_of_sentencepiece_says_what_it_needs(saved: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved["janus"][0], tmp_path / "model"))
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")  # whatever it holds
    with pytest.raises((ImportError, ValueError), match=r"pip install sentencepiece|no tokenizer that can be used"):
        open_pipeline(folder)

"""Prompts, lists of prompts and images that commands read."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vargen.cli.common import MAX_IMAGES
from vargen.cli.console import print_status
from vargen.reading import STDIN, apply_orientation, on_white, open_image, read_text

_MAX_BYTES = 2**26  # size limit of a prompt file


def collect_prompts(prompts: list[str] | None, prompt_file: Path | None, class_label: list[str] | None) -> list[str]:
    """Return the prompts (from standard input for `-`), or the class labels as typed."""
    words = prompts or []
    if class_label:
        if words or prompt_file:
            raise ValueError("give prompts or --class-label, not both")
        return class_label
    if [*words, str(prompt_file)].count(STDIN) > 1:
        raise ValueError("prompts can come from standard input once, and '-' is given twice")
    parts = [read_prompts(Path(STDIN), "prompt") if word == STDIN else [word] for word in words]
    listed = [*itertools.chain(*parts), *(read_prompts(prompt_file) if prompt_file else [])]
    if not listed:
        raise ValueError('give a prompt, for example: vargen generate "a red apple"')
    if len(words) > 1 and not any(" " in word for word in words):
        hint = shlex.quote(" ".join(words)[:40])
        print_status(f"{len(words)} prompts of one word each. Quote a prompt of several words: vargen generate {hint}")
    return listed


def read_prompts(path: Path | None, name: str = "prompt_file") -> list[str]:
    """Read one prompt per line from a UTF-8 text file, or from standard input for `-`; None: the 64 packaged ones.

    Benchmarks' own files also: see `read_prompt_records`.
    """
    return [record["prompt"] for record in read_prompt_records(path, name)]


def read_prompt_records(path: Path | None, name: str = "prompt_file") -> list[dict[str, Any]]:
    """Read prompts with what a file says of them: `.jsonl`, an object with "prompt" per line, or a folder of .txt files.

    A file of the folder is a prompt, and its name the "item" of the record. Other files say nothing else of their prompts.
    """
    if path is None:
        import vargen.assets

        path = Path(vargen.assets.__file__).parent / "prompts.txt"
    if os.path.isdir(path):  # Path.is_dir would raise if the name is too long for a file name
        files = sorted(path.glob("*.txt"))
        found = [{"prompt": read_text(file, name, _MAX_BYTES).strip(), "item": file.stem} for file in files]
    else:
        lines = [line.strip() for line in read_text(path, name, _MAX_BYTES).split("\n")]
        lines = [line for line in lines if line and not line.startswith("#")]
        read = _read_record if path.suffix.lower() == ".jsonl" else lambda line: {"prompt": line}
        found = [read(line) for line in lines]
    if any(not isinstance(each.get("prompt"), str) or not each["prompt"] for each in found):
        raise ValueError(f"{name} {str(path)!r} must hold a prompt in each line or file")
    if not 1 <= len(found) <= MAX_IMAGES:
        allowed = f"from 1 to {MAX_IMAGES:,} prompts, one per line, without a leading #"
        raise ValueError(f"{name} {str(path)!r} must hold {allowed}; it holds {len(found):,}")
    return found


def _read_record(line: str) -> dict[str, Any]:
    """Return the object of a line of JSON; empty if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def report_emoji_names(pipe: Any, prompts: Iterable[str]) -> None:
    """Print a line to stderr about the characters in prompts that the model reads as names, if there are any."""
    read = {typed: name for prompt in prompts for typed, name in pipe.normalize_prompt(prompt).names.items()}
    if read:
        print_status("read " + ", ".join(f'"{typed}" as "{name}"' for typed, name in read.items()))


def read_source(path: Path, name: str, keep_alpha: bool = False) -> Any:
    """Read an image file as RGB, with its EXIF orientation applied.

    Args:
        name: the option that gave the path. keep_alpha: keep the mode of the file, in which a mask may be transparent.
    """
    with open_image(path, name) as opened:
        image: Any = apply_orientation(opened).copy() if keep_alpha else on_white(opened)
    image.filename = str(path)  # for warnings
    return image

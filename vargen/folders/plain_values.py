"""Plain values of a model folder's JSON files: what passes on to another library, and a private folder for it to read.

A folder is data. Classes come from our own tables, only listed settings pass on, and no value is a path or a module.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vargen.values import parse_float, short_repr

_LONGEST = 1000  # characters of a text


def pick_values(values: Mapping[str, Any], kinds: Mapping[str, type], file: Path) -> dict[str, Any]:
    """Return those values that are listed in `kinds` and are not null."""
    found = {}
    for name, kind in kinds.items():
        value = values.get(name)
        if value is None:
            continue
        number = kind is float and parse_float(value) is not None
        if not number and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
            what = {bool: "true or false", float: "a number", int: "a whole number", str: "text", list: "a list"}[kind]
            raise ValueError(f"{file} has {name}: {short_repr(value)}, expected {what}")
        found[name] = value
    return found


def validate_string(value: Any, file: Path, name: str) -> str:
    """Return a text of bounded length; ValueError naming the file and the key for anything else."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"{file} has {name}: {short_repr(value)}, expected text of at most {_LONGEST} characters")
    return value


def one_line(error: BaseException) -> str:
    """Return the message of another library's error as one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"{text} is missing or not known"
    return text if len(text) <= 300 else f"{text[:296]} ..."


@contextmanager
def private_folder(files: Mapping[str, Path | Mapping[str, Any]]) -> Iterator[Path]:
    """Yield a temporary folder with nothing but these files: links to files, or JSON files with given values."""
    with tempfile.TemporaryDirectory(prefix="vargen-") as place:
        fill_folder(Path(place), files)
        yield Path(place)


def fill_folder(folder: Path, files: Mapping[str, Path | Mapping[str, Any]]) -> None:
    """Write files as `private_folder` describes."""
    for name, source in files.items():
        if not isinstance(source, Path):
            (folder / name).write_text(json.dumps(source), "utf-8")
            continue
        try:
            os.symlink(source.resolve(), folder / name)
        except OSError:  # Windows allows links to some users only
            shutil.copyfile(source, folder / name)

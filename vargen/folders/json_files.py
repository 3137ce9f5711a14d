"""JSON files of model folders, and what of their values passes on to another library.

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

from vargen.reading import read_bounded
from vargen.values import parse_float, short_repr

INCOMPLETE = "the folder is incomplete, download or convert it again"
# Configuration keys that make the library fetch or run code: remote classes of transformers and diffusers, and kernels from
# the Hub, which transformers accepts as the name of an attention or expert implementation.
_CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines", "custom_generate", "audio_tokenizer")
_KERNEL_KEYS = ("implementation", "implementation_internal")
_MAX_JSON, _MAX_VALUES = 2**26, 2**22  # bytes of a JSON file, and values in it
_LONGEST = 1000  # characters of a text


def read_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; {INCOMPLETE}")
    try:
        data = read_bounded(file, _MAX_JSON)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    if sum(data.count(mark) for mark in (b"[", b"{", b",")) > _MAX_VALUES:
        raise ValueError(f"{file} must hold at most {_MAX_VALUES:,} values")
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(content).__name__}")
    return content


def read_config(file: Path) -> dict[str, Any]:
    """Read a configuration; ValueError as `read_object`, or if it requests code at any depth to be fetched or run."""
    config = read_object(file)
    waiting: list[Any] = [config]
    while waiting:
        values = waiting.pop()
        waiting += [each for each in (values.values() if isinstance(values, dict) else values) if isinstance(each, dict | list)]
        for key, value in values.items() if isinstance(values, dict) else ():
            kernel = key.endswith(_KERNEL_KEYS) and isinstance(value, str | dict) and "/" in str(value)
            if kernel or (key.startswith(_CODE_KEYS) and value):
                raise ValueError(
                    f"{file} has {key!r}: {short_repr(value)}, which asks for code from elsewhere; vargen runs none"
                )
    return config


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

"""JSON files of model folders, and what of their values passes on to another library.

A folder is data. Classes come from our own tables, only listed settings pass on, and no value is a path or a module.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vargen.reading import open_regular
from vargen.values import NumberRange, short_repr

INCOMPLETE = "the folder is incomplete, download or convert it again"
# Configuration keys that make the library fetch or run code: remote classes of transformers and diffusers, and kernels from
# the Hub, which transformers accepts as the name of an attention or expert implementation.
_CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines", "custom_generate", "audio_tokenizer")
_KERNEL_KEYS = ("implementation", "implementation_internal")
_MAX_JSON, _MAX_VALUES = 2**26, 2**22  # bytes of a JSON file, and values in it
_LONGEST = 1000  # characters of a text


def expect(fits: bool, name: str, value: Any, file: Path, expected: str) -> None:
    """Raise ValueError naming the file and the setting, unless its value fits."""
    if not fits:
        raise ValueError(f"{file} has {name}: {short_repr(value)}, expected {expected}")


@dataclass(frozen=True)
class Kind:
    """The values that a setting may have: a test, and what it accepts in words; of numbers, a `NumberRange`."""

    fits: Callable[[Any], bool]
    allowed: str


Allowed = Kind | NumberRange
whole = partial(NumberRange, is_integer=True)
BOOL = Kind(lambda value: isinstance(value, bool), "true or false")
TEXT = Kind(lambda value: isinstance(value, str) and len(value) <= _LONGEST, f"text of at most {_LONGEST} characters")


def choice(*allowed: str) -> Kind:
    """One of these texts."""
    return Kind(lambda value: value in allowed, f"one of {', '.join(allowed)}")


def read_data(file: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; {INCOMPLETE}")
    if file.stat().st_size > most:
        raise ValueError(f"{file} must have at most {most:,} bytes")
    try:
        with open_regular(file) as opened:
            return opened.read()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error


def read_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    data = read_data(file, _MAX_JSON)
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


def pick_values(values: Mapping[str, Any], kinds: Mapping[str, Allowed], file: Path) -> dict[str, Any]:
    """Return those values that are listed in `kinds` and are not null, each of which must fit."""
    found = {name: values[name] for name in kinds if values.get(name) is not None}
    for name, value in found.items():
        expect(kinds[name].fits(value), name, value, file, kinds[name].allowed)
    return found


def fill_folder(folder: Path, files: Mapping[str, Path | Mapping[str, Any]]) -> None:
    """Write files by name: links to files, or JSON files with given values."""
    for name, source in files.items():
        if not isinstance(source, Path):
            (folder / name).write_text(json.dumps(source), "utf-8")
            continue
        try:
            os.symlink(source.resolve(), folder / name)
        except OSError:  # Windows allows links to some users only
            shutil.copyfile(source, folder / name)

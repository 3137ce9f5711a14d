"""Writing of results: independent atomic writes, JSON, and images with their parameters."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from vargen.cli.console import describe_error, print_json, print_status
from vargen.cli.outputs import OutputFile, model_files, result_file, validate_distinct_paths
from vargen.files import atomic_file

# Lower-case suffix -> Pillow's format and save options.
_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".png": ("PNG", {}),
    ".jpg": ("JPEG", {"quality": 95}),
    ".jpeg": ("JPEG", {"quality": 95}),
    ".webp": ("WEBP", {"lossless": True}),
}

Write = tuple[str, Callable[[], object]]  # a description for errors, and the function that writes


class ResultWriter:
    """The results of a measurement: a table on stdout, or JSON in its place; and the file of --json."""

    def __init__(self, as_json: str | None = None):
        self.prints_json = as_json == "-"
        self.json_file = result_file(as_json)

    def check(
        self,
        models: Iterable[str] = (),
        outputs: Mapping[str, Iterable[OutputFile | Path | None]] | None = None,
        inputs: Mapping[str, Iterable[Path | None]] | None = None,
    ) -> None:
        """Raise ValueError if outputs are the same file, or would overwrite an input or a file of a model."""
        every = {**(outputs or {}), "json": [self.json_file]}
        validate_distinct_paths(every, {**(inputs or {}), "a file of model": model_files(*models)})

    def write(self, text: str, document: Any, others: Iterable[Write] = ()) -> None:
        """Write everything that was requested. Measurements go first: they took the longest, and are the smallest files.

        Raises:
            typer.Exit: as `write_each`.
        """
        writes: list[Write] = []
        if self.prints_json:
            writes.append(("json", lambda: print_json(document)))
        else:
            writes.append(("table", lambda: print(text, flush=True)))
        if (file := self.json_file) is not None:
            writes.append((f"json {str(file)!r}", lambda: write_json(file, document)))
        writes += others
        write_each(writes)

    def print_path(self, path: Path) -> None:
        """Print the name of a written file, unless stdout is for JSON."""
        if not self.prints_json:
            print(path, flush=True)


def write_json(file: Path, document: Any) -> None:
    with atomic_file(file) as temporary:
        temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_each(writes: Iterable[Write]) -> None:
    """Perform all writes, each with a description; a failed write does not prevent the others.

    Raises:
        typer.Exit: with code 1 if a write failed; each failure was reported in one line.
        BrokenPipeError: after the other writes, if the reader of standard output has closed it, which is not an error.
    """
    failed: list[Exception] = []
    for name, write in writes:
        try:
            write()
        except BrokenPipeError as error:
            failed.insert(0, error)
        except Exception as error:  # such as a full disk, or pixels that are NaN
            failed.append(error)
            print_status(describe_failed_write(name, error))
    if failed and isinstance(failed[0], BrokenPipeError):
        raise failed[0]
    if failed:
        raise typer.Exit(1)


def describe_failed_write(name: str, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else describe_error(error)
    return f"error: {name} was not written: {reason}"


def unused_path(file: OutputFile) -> Path:
    """Return the path to write to: a derived name that exists gets a number."""
    path = file.path
    for number in itertools.count(2):
        if file.explicit or not os.path.lexists(path):
            break
        path = file.path.with_name(f"{file.path.stem}-{number}{file.path.suffix}")
    return path


def save_image(image: Any, file: OutputFile, parameters: dict[str, Any]) -> Path:
    """Write a PIL image atomically and return its path. PNG files carry `parameters`: see `vargen.image_metadata`.

    A name that the user did not give never overwrites a file: `apple-7.png` becomes `apple-7-2.png`.
    """
    from vargen.image_metadata import png_chunks

    path = unused_path(file)
    kind, options = _FORMATS[path.suffix.lower()]
    if kind == "PNG":
        options = {**options, "pnginfo": png_chunks(parameters, image.size)}
    with atomic_file(path) as temporary:
        image.save(temporary, format=kind, **options)
    return path

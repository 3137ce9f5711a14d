"""Where results go: names made of prompts, checks before anything is drawn, files that appear whole, each for itself."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from vargen.cli.console import describe, print_json, say
from vargen.compat import check_matplotlib
from vargen.files import atomic_file, expand_user

# Lower-case suffix -> Pillow's format and how to save it.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".png": ("PNG", {}),
    ".jpg": ("JPEG", {"quality": 95}),
    ".jpeg": ("JPEG", {"quality": 95}),
    ".webp": ("WEBP", {"lossless": True}),
}
LONGEST_SLUG = 40
_LONGEST_NAME = 200  # bytes; file systems allow 255, and the temporary name is longer
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


@dataclass(frozen=True)
class Target:
    """A file to write. `named`: by the user, who then means to overwrite it."""

    path: Path
    named: bool


def slug(text: str) -> str:
    """A prompt as a file name: 1 to 40 of a-z, 0-9 and single inner hyphens; never a name that systems reserve."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    short = re.sub("[^a-z0-9]+", "-", plain).strip("-")[:LONGEST_SLUG].strip("-")
    return f"image-{short}" if short in _RESERVED else short or "image"


def targets(
    output: str | None, stems: list[str], name: str = "output", formats: Iterable[str] = tuple(FORMATS), usual: str = ".png"
) -> list[Target]:
    """The file of each image; `stems` name those that the user does not name.

    `output` is a folder if it exists as one, ends with a separator or has no suffix; else a file, numbered from 1 when
    there are several images. None is the current folder.

    Args:
        name: of the option, for errors. formats: suffixes that a file may have. usual: that of files in a folder.

    Raises:
        ValueError: for a suffix of no known format, or a place that cannot be written.
    """
    if output is None or _is_folder(output, name):
        folder = expand_user(output or ".", name)
        check_writable(folder, name)
        return [Target(folder / f"{stem}{usual}", named=False) for stem in stems]
    path = expand_user(output, name)
    known = ", ".join(suffix[1:] for suffix in formats)
    if path.suffix.lower() not in formats:
        raise ValueError(f"{name} must be a folder (end it with {os.sep}) or a file ending in one of {known}, got {output!r}")
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise ValueError(f"{name} must have a name of at most {_LONGEST_NAME} bytes, got {len(os.fsencode(path.name))}")
    check_writable(path.parent, name)
    paths = [path]
    if len(stems) > 1:
        paths = [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, len(stems) + 1)]
    for each in paths:
        if each.is_dir():
            raise ValueError(f"{name} {str(each)!r} is a folder; give a file name that is free")
    return [Target(each, named=True) for each in paths]


def _is_folder(output: str, name: str) -> bool:
    if output in ("", "-"):
        raise ValueError(f"{name} must name a file or a folder, got {output!r}")
    separators = tuple(s for s in (os.sep, os.altsep) if s)
    try:
        exists = expand_user(output, name).is_dir()
    except OSError as error:  # a name too long, links in a circle
        raise ValueError(f"{name} {output!r} cannot be written: {error.strerror}") from error
    return exists or output.endswith(separators) or not Path(output).suffix


def result_file(path: str | Path | None, suffix: str, name: str) -> Path | None:
    """The file of a table or a plot, checked before minutes of measuring; None if none is asked for, or `-`, standard output.

    Raises:
        ValueError: for another suffix, or a place that cannot be written.
        ImportError: for a plot without matplotlib.
    """
    if path is None or (path == "-" and name == "json"):
        return None
    file = expand_user(path, name)
    if file.suffix.lower() != suffix or file.is_dir():
        raise ValueError(f"{name} must be a file ending in {suffix}, got {str(path)!r}")
    check_writable(file.parent, name)
    if name == "plot":
        check_matplotlib("--plot needs")
    return file


def check_writable(folder: Path, name: str = "output") -> None:
    """Raise ValueError unless files can be made in `folder`, or the folder itself can be made. Leaves nothing behind."""
    try:
        nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists() or p.is_symlink())
        if not nearest.is_dir():
            raise ValueError(f"{name} folder {str(folder)!r} cannot be written: {str(nearest)!r} is not a folder")
        with tempfile.TemporaryFile(dir=nearest):  # the one check that also holds for root and read-only disks
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{name} folder {str(folder)!r} cannot be written: {reason}") from error


def check_apart(
    outputs: Mapping[str, Iterable[Target | Path | None]], inputs: Mapping[str, Iterable[Path | None]] | None = None
) -> None:
    """Raise ValueError where two outputs of a command would be one file, or one would overwrite what the command reads.

    One file has many names: through symbolic and hard links, and where the file system takes `A.png` for `a.png`.

    Args:
        outputs: by option. Paths are as `Target`s that the user named. inputs: by option.
    """
    read = {key: (name, path) for name, paths in (inputs or {}).items() for path in paths if path for key in _identities(path)}
    places = [
        (name, Target(place, named=True) if isinstance(place, Path) else place)
        for name, listed in outputs.items()
        for place in listed
        if place is not None
    ]
    taken: dict[Hashable, tuple[str, Target]] = {}
    for name, target in places:
        for key in _identities(target.path):
            if target.named and key in read and _really(key, target.path, read[key][1]):
                raise ValueError(f"{said(name, target.path)} would overwrite {said(*read[key])}; name another file")
            other, at = taken.setdefault(key, (name, target))
            if at is not target and (at.named or target.named) and _really(key, target.path, at.path):
                raise ValueError(f"{said(name, target.path)} is also {said(other, at.path)}; one would be lost, name two")
    for name, target in places:  # a made-up name that is taken gets a number, and could then equal a name that was given
        short = target.path.with_stem(re.sub(r"(?<=.)-\d+$", "", target.path.stem))
        for key in _identities(short) if target.named and short != target.path else ():
            other, at = taken.get(key, (name, target))
            if not at.named and _really(key, short, at.path):
                raise ValueError(f"{said(name, target.path)} may be taken by {said(other, at.path)}; name another file")


def said(name: str, path: Path) -> str:
    return f"{name} {str(path)!r}"


def _identities(path: Path) -> Iterator[Hashable]:
    """Keys of a path; two names of the same file have at least one key in common."""
    real = os.path.realpath(path)
    yield real
    try:
        status = os.stat(real)
    except OSError:
        pass
    else:
        yield status.st_dev, status.st_ino
    yield "case", real.casefold()


def _really(key: Hashable, first: Path, second: Path) -> bool:
    """Whether two paths that share a key are one file."""
    if not (isinstance(key, tuple) and key[0] == "case"):
        return True
    return os.path.realpath(first) == os.path.realpath(second) or ignores_case(first.absolute().parent)


def ignores_case(folder: Path) -> bool:
    """Whether the file system takes names that differ in case alone for one; by trial, in the nearest folder that exists."""
    try:
        nearest = next(place for place in (folder, *folder.parents) if place.is_dir())
        with tempfile.NamedTemporaryFile(prefix=".vargen-case-", dir=nearest) as probe:
            return Path(probe.name).with_name(Path(probe.name).name.upper()).exists()
    except OSError:
        return False


def model_files(model: str) -> list[Path]:
    """Files of a model in a local folder that an output might be named like."""
    folder = expand_user(model, "model")
    return [*folder.glob("*.json"), *folder.glob("*/*.json")] if folder.is_dir() else []


Write = tuple[str, Callable[[], object]]  # what is written, for errors, and how


def json_writes(as_json: str | None, file: Path | None, document: Any) -> list[Write]:
    """What `--json` asks for: nothing, a `file`, or for `-` standard output."""
    if as_json == "-":
        return [("json", lambda: print_json(document))]
    return [] if file is None else [(f"json {str(file)!r}", lambda: _write_json(file, document))]


def _write_json(file: Path, document: Any) -> None:
    with atomic_file(file) as temporary:
        temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_each(writes: Iterable[Write]) -> None:
    """Carry out all writes, each with a name for what it writes; one that fails does not take the others with it.

    Raises:
        typer.Exit: with code 1, when one failed; each that did was reported in a line.
        BrokenPipeError: after the other writes, when the reader of standard output is gone, which is no failure of ours.
    """
    failed: list[Exception] = []
    for name, write in writes:
        try:
            write()
        except BrokenPipeError as error:
            failed.insert(0, error)
        except Exception as error:  # a full disk, or pixels that are no numbers
            failed.append(error)
            say(not_written(name, error))
    if failed and isinstance(failed[0], BrokenPipeError):
        raise failed[0]
    if failed:
        raise typer.Exit(1)


def not_written(name: str, error: Exception) -> str:
    """The line that reports a failed write."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else describe(error)
    return f"error: {name} was not written: {reason}"


def free_path(target: Target) -> Path:
    """Where to write: a name that the user did not give gets a number where it is taken."""
    path = target.path
    for number in itertools.count(2):
        if target.named or not os.path.lexists(path):
            break
        path = target.path.with_name(f"{target.path.stem}-{number}{target.path.suffix}")
    return path


def save_image(image: Any, target: Target, parameters: dict[str, Any]) -> Path:
    """Write a PIL image whole or not at all; returns where. PNG files carry `parameters` as JSON in a text chunk `vargen`.

    A name that the user did not give is never overwritten: `apple-7.png` becomes `apple-7-2.png`.
    """
    from PIL.PngImagePlugin import PngInfo

    path = free_path(target)
    kind, options = FORMATS[path.suffix.lower()]
    if kind == "PNG":
        chunk = PngInfo()
        chunk.add_text("vargen", json.dumps(parameters))
        options = {**options, "pnginfo": chunk}
    with atomic_file(path) as temporary:
        image.save(temporary, format=kind, **options)
    return path

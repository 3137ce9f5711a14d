"""Output files: names derived from prompts, checks before generation starts, and independent atomic writes."""

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

# Lower-case suffix -> Pillow's format and save options.
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
    """A file to write. `named`: the user gave the name, so an existing file is overwritten."""

    path: Path
    named: bool


def slug(text: str) -> str:
    """Turn a prompt into a file name: 1 to 40 characters of a-z, 0-9 and single inner hyphens, never a name reserved by a
    system.
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    short = re.sub("[^a-z0-9]+", "-", plain).strip("-")[:LONGEST_SLUG].strip("-")
    return f"image-{short}" if short in _RESERVED else short or "image"


def targets(
    output: str | None, stems: list[str], name: str = "output", formats: Iterable[str] = tuple(FORMATS), usual: str = ".png"
) -> list[Target]:
    """Return the file of each image; `stems` name the files that the user does not name.

    `output` is a folder if it is an existing folder, ends with a separator or has no suffix; otherwise it is a file, numbered
    from 1 if there are several images. None means the current folder.

    Args:
        name: the option's name, for errors. formats: suffixes that a file may have. usual: suffix of the files in a folder.

    Raises:
        ValueError: for a suffix of an unknown format, or a path that is not writable.
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
    except OSError as error:  # the name is too long, or symbolic links form a loop
        raise ValueError(f"{name} {output!r} cannot be written: {error.strerror}") from error
    return exists or output.endswith(separators) or not Path(output).suffix


def result_file(path: str | Path | None, suffix: str, name: str) -> Path | None:
    """Return the path of a table or plot, checked before minutes of measurement.

    None if no file is requested, or for `-`, standard output.

    Raises:
        ValueError: for another suffix, or a path that is not writable.
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
    """Raise ValueError unless files can be created in `folder`, or the folder itself can be. Leaves no file on disk."""
    try:
        nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists() or p.is_symlink())
        if not nearest.is_dir():
            raise ValueError(f"{name} folder {str(folder)!r} cannot be written: {str(nearest)!r} is not a folder")
        with tempfile.TemporaryFile(dir=nearest):  # the only check that also works for root and on read-only disks
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{name} folder {str(folder)!r} cannot be written: {reason}") from error


def check_apart(
    outputs: Mapping[str, Iterable[Target | Path | None]], inputs: Mapping[str, Iterable[Path | None]] | None = None
) -> None:
    """Raise ValueError if two outputs of a command are the same file, or if one would overwrite an input.

    A file can have several names: through symbolic and hard links, and `A.png` and `a.png` on a case-insensitive file system.

    Args:
        outputs: by option. Paths are treated as `Target`s that the user named. inputs: by option.
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
    for name, target in places:  # a derived name that exists gets a number, and could then equal a name given by the user
        short = target.path.with_stem(re.sub(r"(?<=.)-\d+$", "", target.path.stem))
        for key in _identities(short) if target.named and short != target.path else ():
            other, at = taken.get(key, (name, target))
            if not at.named and _really(key, short, at.path):
                raise ValueError(f"{said(name, target.path)} may be taken by {said(other, at.path)}; name another file")


def said(name: str, path: Path) -> str:
    return f"{name} {str(path)!r}"


def _identities(path: Path) -> Iterator[Hashable]:
    """Yield keys of a path; two names of the same file share at least one key."""
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
    """Whether two paths that share a key are the same file."""
    if not (isinstance(key, tuple) and key[0] == "case"):
        return True
    return os.path.realpath(first) == os.path.realpath(second) or ignores_case(first.absolute().parent)


def ignores_case(folder: Path) -> bool:
    """Whether the file system is case-insensitive, tested in the nearest existing folder."""
    try:
        nearest = next(place for place in (folder, *folder.parents) if place.is_dir())
        with tempfile.NamedTemporaryFile(prefix=".vargen-case-", dir=nearest) as probe:
            return Path(probe.name).with_name(Path(probe.name).name.upper()).exists()
    except OSError:
        return False


def model_files(model: str) -> list[Path]:
    """Return the files of a model in a local folder, which an output must not overwrite."""
    folder = expand_user(model, "model")
    return [*folder.glob("*.json"), *folder.glob("*/*.json")] if folder.is_dir() else []


Write = tuple[str, Callable[[], object]]  # a description for errors, and the function that writes


def json_writes(as_json: str | None, file: Path | None, document: Any) -> list[Write]:
    """Return the writes for `--json`: none, a `file`, or standard output for `-`."""
    if as_json == "-":
        return [("json", lambda: print_json(document))]
    return [] if file is None else [(f"json {str(file)!r}", lambda: _write_json(file, document))]


def _write_json(file: Path, document: Any) -> None:
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
            say(not_written(name, error))
    if failed and isinstance(failed[0], BrokenPipeError):
        raise failed[0]
    if failed:
        raise typer.Exit(1)


def not_written(name: str, error: Exception) -> str:
    """Return the line that reports a failed write."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else describe(error)
    return f"error: {name} was not written: {reason}"


def free_path(target: Target) -> Path:
    """Return the path to write to: an existing name gets a number unless the user gave it."""
    path = target.path
    for number in itertools.count(2):
        if target.named or not os.path.lexists(path):
            break
        path = target.path.with_name(f"{target.path.stem}-{number}{target.path.suffix}")
    return path


def save_image(image: Any, target: Target, parameters: dict[str, Any]) -> Path:
    """Write a PIL image atomically and return its path. PNG files carry `parameters` as JSON in a text chunk `vargen`.

    A name that the user did not give never overwrites a file: `apple-7.png` becomes `apple-7-2.png`.
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

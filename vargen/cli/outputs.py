"""Output files of a command: their names, derived from prompts, and checks before any work starts."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
import unicodedata
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vargen.files import expand_user

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MAX_SLUG = 40  # characters
_MAX_NAME = 200  # bytes; file systems allow 255, and the temporary name is longer
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


@dataclass(frozen=True)
class OutputFile:
    """A file to write. `explicit`: the user gave the name, so an existing file is overwritten."""

    path: Path
    explicit: bool


def slugify(text: str) -> str:
    """Turn a prompt into a file name of 1 to 40 characters of a-z, 0-9 and single inner hyphens, which no system reserves."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    short = re.sub("[^a-z0-9]+", "-", plain).strip("-")[:MAX_SLUG].strip("-")
    return f"image-{short}" if short in _RESERVED else short or "image"


def resolve_outputs(
    output: str | None, stems: list[str], name: str = "output", suffixes: Iterable[str] = IMAGE_SUFFIXES, default: str = ".png"
) -> list[OutputFile]:
    """Return the file of each image; `stems` name the files that the user does not name.

    `output` is a folder if it is an existing folder, ends with a separator or has no suffix; otherwise it is a file, numbered
    from 1 if there are several images. None means the current folder.

    Args:
        name: the option's name, for errors. suffixes: of the files that are allowed. default: suffix of the files in a folder.

    Raises:
        ValueError: for a suffix of an unknown format, or a path that is not writable.
    """
    if output is None or _is_folder(output, name):
        folder = expand_user(output or ".", name)
        validate_writable(folder, name)
        return [OutputFile(folder / f"{stem}{default}", explicit=False) for stem in stems]
    path = expand_user(output, name)
    known = ", ".join(suffix[1:] for suffix in suffixes)
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{name} must be a folder (end it with {os.sep}) or a file ending in one of {known}, got {output!r}")
    if len(os.fsencode(path.name)) > _MAX_NAME:
        raise ValueError(f"{name} must have a name of at most {_MAX_NAME} bytes, got {len(os.fsencode(path.name))}")
    validate_writable(path.parent, name)
    paths = [path]
    if len(stems) > 1:
        paths = [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, len(stems) + 1)]
    for each in paths:
        if each.is_dir():
            raise ValueError(f"{name} {str(each)!r} is a folder; give another file name")
    return [OutputFile(each, explicit=True) for each in paths]


def _is_folder(output: str, name: str) -> bool:
    if output in ("", "-"):
        raise ValueError(f"{name} must name a file or a folder, got {output!r}")
    separators = tuple(s for s in (os.sep, os.altsep) if s)
    try:
        exists = expand_user(output, name).is_dir()
    except OSError as error:  # the name is too long, or symbolic links form a loop
        raise ValueError(f"{name} {output!r} cannot be written: {error.strerror}") from error
    return exists or output.endswith(separators) or not Path(output).suffix


def result_file(path: str | None) -> Path | None:
    """Return the path of a JSON file; None if no file is requested, or for `-`, standard output.

    Raises:
        ValueError: for another suffix, or a path that is not writable.
    """
    if path in (None, "-"):
        return None
    file = expand_user(path, "json")
    if file.suffix.lower() != ".json" or file.is_dir():
        raise ValueError(f"json must be a file ending in .json, got {path!r}")
    validate_writable(file.parent, "json")
    return file


def validate_writable(folder: Path, name: str = "output") -> None:
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


def validate_distinct_paths(
    outputs: Mapping[str, Iterable[OutputFile | Path | None]], inputs: Mapping[str, Iterable[Path | None]] | None = None
) -> None:
    """Raise ValueError if two outputs of a command are the same file, or if one would overwrite an input.

    A file can have several names: through symbolic and hard links, and `A.png` and `a.png` on a case-insensitive file system.

    Args:
        outputs: by option. A path is an output that the user named. inputs: by option.
    """
    read = {_file_key(path): (name, path) for name, paths in (inputs or {}).items() for path in paths if path}
    files = [
        (name, OutputFile(each, explicit=True) if isinstance(each, Path) else each)
        for name, listed in outputs.items()
        for each in listed
        if each is not None
    ]
    used: dict[Hashable, tuple[str, OutputFile]] = {}
    for name, file in files:
        key = _file_key(file.path)
        if file.explicit and key in read:
            raise ValueError(f"{_describe(name, file.path)} would overwrite {_describe(*read[key])}; name another file")
        other_name, other = used.setdefault(key, (name, file))
        if other is not file and (other.explicit or file.explicit):
            raise ValueError(f"{_describe(name, file.path)} is also {_describe(other_name, other.path)}; name two files")
    for name, file in files:  # a derived name that exists gets a number, and could then equal a name given by the user
        unnumbered = file.path.with_stem(re.sub(r"(?<=.)-\d+$", "", file.path.stem))
        if not file.explicit or unnumbered == file.path or (found := used.get(_file_key(unnumbered))) is None:
            continue
        if not found[1].explicit:
            message = f"{_describe(name, file.path)} may be used by {_describe(found[0], found[1].path)}"
            raise ValueError(f"{message}; name another file")


def validate_run_outputs(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None], model: str, run: Path | None = None
) -> None:
    """Raise ValueError if an output of an evaluation would overwrite an input or a file of a run.

    Args:
        outputs, inputs: by option; runs that contain an input are also protected.
        model: the model whose files are read; empty for none. run: run directory, existing or to be created.
    """
    read = {name: expand_user(path, name) for name, path in inputs.items() if path is not None}
    for folder in (run, *map(_find_run, read.values())):
        if folder is not None:
            _check_outside(outputs, folder)
    files = {name: [path] for name, path in read.items()} | {"a file of model": model_files(model) if model else []}
    validate_distinct_paths({name: [file] for name, file in outputs.items()}, files)


def _find_run(path: Path) -> Path | None:
    """Return the run directory that contains a file or folder."""
    from vargen.evaluation.run_directory import RunDirectory

    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        with contextlib.suppress(ValueError, OSError):
            RunDirectory(folder).settings()
            return folder
    return None


def _check_outside(outputs: Mapping[str, Path | None], run: Path) -> None:
    """Raise ValueError if an output is in a run directory, also through a link, or is a hard link to one of its files."""
    root = _file_key(run)
    for name, file in outputs.items():
        if file is None:
            continue
        real = Path(os.path.realpath(file))
        folder = Path(os.path.realpath(file.absolute().parent))
        parents = {*real.parents, folder, *folder.parents}
        if any(_file_key(each) == root for each in parents) or _is_hard_link(real, run):
            raise ValueError(f"{_describe(name, file)} would be a file of the run in {str(run)!r}; name one elsewhere")


def _is_hard_link(file: Path, folder: Path) -> bool:
    """Whether a file is a hard link to a file in a folder."""
    try:
        status = file.stat()
    except OSError:
        return False
    if status.st_nlink < 2:
        return False
    found = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    return any(os.path.samestat(os.lstat(each), status) for each in found)


def _file_key(path: Path) -> Hashable:
    """Return a key that all names of a file share, whether or not it exists yet."""
    real = os.path.realpath(path)
    try:
        status = os.stat(real)
    except OSError:
        return real.casefold() if ignores_case(Path(real).parent) else real
    return status.st_dev, status.st_ino


def ignores_case(folder: Path) -> bool:
    """Whether the file system is case-insensitive, tested in the nearest existing folder."""
    nearest = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    return nearest is not None and _ignores_case(nearest)


@functools.cache
def _ignores_case(folder: Path) -> bool:
    try:
        with tempfile.NamedTemporaryFile(prefix=".vargen-case-", dir=folder) as probe:
            return Path(probe.name).with_name(Path(probe.name).name.upper()).exists()
    except OSError:
        return False


def _describe(name: str, path: Path) -> str:
    return f"{name} {str(path)!r}"


def model_files(*models: str) -> list[Path]:
    """Return the files of models in local folders, which an output must not overwrite."""
    folders = [folder for model in models if (folder := expand_user(model, "model")).is_dir()]
    return [file for folder in folders for pattern in ("*.json", "*/*.json") for file in folder.glob(pattern)]

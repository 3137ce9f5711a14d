"""Output files of a command: their names, derived from prompts, and checks before any work starts."""

from __future__ import annotations

import os
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping
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


def result_file(path: str | Path | None, suffix: str = ".json", name: str = "json") -> Path | None:
    """Return the path of a result file; None if no file is requested, or for `-`, standard output."""
    if path is None or path == "-":
        return None
    file = expand_user(path, name)
    if file.suffix.lower() != suffix or file.is_dir():
        raise ValueError(f"{name} must be a file ending in {suffix}, got {str(path)!r}")
    validate_writable(file.parent, name)
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

    Args:
        outputs: by option. A path is an output that the user named. inputs: by option.
    """
    read = {path.resolve(): (name, path) for name, paths in (inputs or {}).items() for path in paths if path}
    used: dict[Path, tuple[str, OutputFile]] = {}
    for name, listed in outputs.items():
        for each in listed:
            if each is None:
                continue
            file = OutputFile(each, explicit=True) if isinstance(each, Path) else each
            key = file.path.resolve()
            if file.explicit and key in read:
                raise ValueError(f"{_describe(name, file.path)} would overwrite {_describe(*read[key])}; name another file")
            other_name, other = used.setdefault(key, (name, file))
            if other is not file and (other.explicit or file.explicit):
                raise ValueError(f"{_describe(name, file.path)} is also {_describe(other_name, other.path)}; name two files")


def validate_run_outputs(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None], model: str, run: Path | None = None
) -> None:
    """Raise ValueError if an output of an evaluation would overwrite an input or a file of a run.

    Args:
        outputs, inputs: by option; runs that contain an input are also protected.
        model: the model whose files are read; empty for none. run: run directory, existing or to be created.
    """
    from vargen.evaluation.run_directory import RUN_FILE

    read = {name: expand_user(path, name) for name, path in inputs.items() if path is not None}
    folders = [folder for path in read.values() for folder in (path.resolve(), *path.resolve().parents)]
    runs = {folder for folder in folders if (folder / RUN_FILE).is_file()} | ({run.resolve()} if run is not None else set())
    for name, file in outputs.items():
        if file is not None and (found := runs.intersection(file.resolve().parents)):
            raise ValueError(f"{_describe(name, file)} would be a file of the run in {str(found.pop())!r}; name one elsewhere")
    files = {name: [path] for name, path in read.items()} | {"a file of model": model_files(model) if model else []}
    validate_distinct_paths({name: [file] for name, file in outputs.items()}, files)


def _describe(name: str, path: Path) -> str:
    return f"{name} {str(path)!r}"


def model_files(*models: str) -> list[Path]:
    """Return the files of models in local folders, which an output must not overwrite."""
    folders = [folder for model in models if (folder := expand_user(model, "model")).is_dir()]
    return [file for folder in folders for pattern in ("*.json", "*/*.json") for file in folder.glob(pattern)]

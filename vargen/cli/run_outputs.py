"""Checks that the outputs of `vargen eval` and `score` do not overwrite files of a run or inputs of the command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from vargen.cli.outputs import check_apart, ignores_case, model_files, said
from vargen.evaluation.run_directory import RunFolder
from vargen.files import expand_user


def check_run_outputs(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None], model: str, run: Path | None = None
) -> None:
    """Raise ValueError if an output would overwrite an input or a file of a run, before anything is written.

    Args:
        outputs, inputs: by option; runs that contain an input are also protected.
        model: the model whose files are read; empty for none. run: run directory, existing or to be created.
    """
    read = {name: expand_user(path, name) for name, path in inputs.items() if path is not None}
    for folder in (run, *map(_run_of, read.values())):
        if folder is not None:
            _check_outside(outputs, folder)
    files = {name: [path] for name, path in read.items()} | {"a file of model": model_files(model) if model else []}
    check_apart({name: [file] for name, file in outputs.items()}, files)


def _run_of(path: Path) -> Path | None:
    """Return the run directory that a file or folder belongs to."""
    real = Path(os.path.realpath(path))
    for place in (real, *real.parents):
        with contextlib.suppress(ValueError, OSError):
            RunFolder(place).settings()
            return place
    return None


def _check_outside(outputs: Mapping[str, Path | None], run: Path) -> None:
    """Raise ValueError if an output is in a run directory, existing or to be created, or is one of its files.

    Its files can have several names, as in `check_apart`: by case on a case-insensitive file system, through links to folders,
    and through hard links.
    """
    root = Path(os.path.realpath(run))
    for name, file in outputs.items():
        if file is None:
            continue
        places = [Path(os.path.realpath(file)), Path(os.path.realpath(file.absolute().parent)) / file.name]
        if any(_within(place, root) for place in places) or _hard_linked(places[0], root):
            raise ValueError(f"{said(name, file)} is a file of the run in {str(run)!r}, which has its own; name one elsewhere")


def _within(place: Path, root: Path) -> bool:
    """Whether a path is inside a folder; both must be resolved."""
    for folder in (place, *place.parents):
        if folder == root or (str(folder).casefold() == str(root).casefold() and ignores_case(root)):
            return True
        with contextlib.suppress(OSError):
            if os.path.samefile(folder, root):
                return True
    return False


def _hard_linked(file: Path, root: Path) -> bool:
    """Whether a file is a hard link to a file in a folder."""
    try:
        status = file.stat()
    except OSError:
        return False
    if status.st_nlink < 2:
        return False
    found = (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
    return any(os.path.samestat(os.lstat(each), status) for each in found)

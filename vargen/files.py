"""Atomic writes of files and folders: a process that is killed at any moment leaves the old content or the new, never a mix.

New content is written to a hidden folder `.vargen-*.writing` beside its destination and renamed into place. A killed process
leaves that folder, which later writes in the same place remove after a day.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vargen.compat import cache_folder as cache_folder
from vargen.model_files import list_model_files, stale_weight_files

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PREFIX, _SUFFIX = ".vargen-", ".writing"
_ABANDONED_SECONDS = 86400.0  # without a change for this long, a hidden folder is a killed process's


def expand_user(path: str | Path, name: str = "path") -> Path:
    """Return `path` with a leading `~` or `~user` replaced by the home folder.

    Raises:
        ValueError: naming the argument, if there is no such user or the path contains a NUL byte.
    """
    if "\0" in str(path):
        raise ValueError(f"{name} must be a path, and no path holds a NUL byte, as {str(path)!r} does")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{name} {str(path)!r} begins with a home folder that is not known; write it in full, or as ./{path} if the name "
            "itself begins with ~"
        ) from None


# -- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path of the same file name; the file written to it replaces `path` only if the block succeeds.

    Raises:
        OSError: the folder cannot be created or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _scratch_folder(path.parent) as scratch:
        temporary = scratch / path.name
        yield temporary
        with open(temporary, "r+b") as written:  # Windows flushes only files that are open for writing
            os.fsync(written.fileno())
        os.replace(temporary, path)


@contextmanager
def _scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield a new hidden folder in `folder` and remove it at the end, with any that killed processes left there a day ago."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process removed it, or another user owns it
            changes = [each.lstat().st_mtime for each in (path, *path.rglob("*"))]
            if path.is_dir() and not path.is_symlink() and time.time() - max(changes) > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX, dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# -- folders ---------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_merge(folder: Path) -> Iterator[Path]:
    """Yield an empty folder whose files are added to `folder` if the block succeeds; otherwise none of them is.

    Other files in `folder` are kept, except for shards of weights that were rewritten.

    Raises:
        OSError: the folder cannot be created or replaced; raised before the block runs.
    """
    target = folder.resolve()
    with _replacement(target, lambda new: stale_weight_files(new, target)) as new:
        yield new


@contextmanager
def atomic_folder(output: Path, inputs: list[Path], overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder; the model written to it replaces the one in `output` if the block succeeds, else it is discarded.

    Args:
        output: created with its parents if missing; otherwise only the model files in it are replaced.
        inputs: paths that the block reads; none may be inside `output` if that is replaced.
        overwrite: whether a folder that holds a `model_index.json` may be written to. Any other non-empty folder never is.

    Raises:
        FileExistsError: `output` exists and may not be replaced; raised before the block runs.
        OSError: nothing can be written there, raised before the block runs; or the disk is full.
    """
    target = expand_user(output, "output").resolve()
    _restore_previous(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not overwrite:
            raise FileExistsError(f"{output} exists and is not empty; choose another folder, or overwrite it")
        if not (target / "model_index.json").is_file():
            raise FileExistsError(f"{output} is not a model folder, so it is not overwritten; choose another")
        if any(path.resolve().is_relative_to(target) for path in inputs):
            raise FileExistsError(f"{output} holds what is to be converted; choose another folder")
    with disk_errors(output), _replacement(target, lambda new: map(target.joinpath, list_model_files(target, new))) as new:
        yield new


@contextmanager
def _replacement(target: Path, find_stale: Callable[[Path], Iterable[Path]]) -> Iterator[Path]:
    """Yield an empty folder that replaces `target` if the block succeeds, with the files of `target` that are to be kept.

    Args:
        find_stale: returns the files under `target` that are not kept, given the new folder.
    """
    with contextlib.ExitStack() as stack:
        try:
            _check_replaceable(target)
            beside = next(parent for parent in target.parents if parent.exists())
            new = stack.enter_context(_scratch_folder(beside)) / "new"
            new.mkdir()  # unlike mkdtemp, mkdir follows the umask
        except OSError as error:
            raise OSError(f"cannot write {target}: {error}") from error
        yield new
        if target.is_dir():
            _link_kept_files(target, new, set(find_stale(new)))
        elif not any(new.iterdir()):
            return  # an empty model folder would look like a model
        target.parent.mkdir(parents=True, exist_ok=True)
        _swap(new, target)


def _check_replaceable(target: Path) -> None:
    _restore_previous(target)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError("it is not a folder")
    if os.path.ismount(target) or Path.cwd().is_relative_to(target):
        kind = "a mount point" if os.path.ismount(target) else "the current folder"
        raise OSError(f"{kind} cannot be replaced; choose a folder inside it")


def _link_kept_files(old: Path, new: Path, stale: set[Path]) -> None:
    """Add hard links to `new` for all files in `old` that are not stale and that `new` does not have."""
    shutil.copymode(old, new)
    for place, subfolders, names in os.walk(old):
        folder, copy = Path(place), new / Path(place).relative_to(old)
        links = [name for name in subfolders if (folder / name).is_symlink()]
        if not names and not subfolders:
            copy.mkdir(parents=True, exist_ok=True)
        for name in [*names, *links]:
            if folder / name in stale or os.path.lexists(copy / name):
                continue
            copy.mkdir(parents=True, exist_ok=True)
            try:
                os.link(folder / name, copy / name, follow_symlinks=False)
            except (OSError, NotImplementedError):  # a file system without links
                shutil.copy2(folder / name, copy / name, follow_symlinks=False)


def _swap(new: Path, target: Path) -> None:
    """Move the old `target` to its sibling, `new` into its place, and then the old one to the scratch folder of `new`."""
    previous = previous_folder(target)
    try:
        if target.exists():
            os.replace(target, previous)
        os.replace(new, target)
    finally:
        if previous.exists() and not target.exists():
            os.replace(previous, target)
        with contextlib.suppress(OSError):  # there was none
            os.replace(previous, new.with_name("old"))


def previous_folder(target: Path) -> Path:
    """Return where the old `target` is while it is being replaced, and still is if a process was killed at that moment."""
    return target.parent / f".{target.name}.vargen-previous"


def _restore_previous(target: Path) -> None:
    previous = previous_folder(target)
    if previous.exists() and target.exists():
        raise FileExistsError(f"{previous} holds an earlier {target.name}, left by a killed process; move or delete it first")
    if previous.exists():
        os.replace(previous, target)


def validate_not_interrupted(target: Path) -> None:
    """Raise FileNotFoundError if `target` is missing because a process was killed while it replaced it."""
    previous = previous_folder(target)
    if os.path.isdir(previous) and not os.path.exists(target):  # unlike Path's, false for names that are too long
        raise FileNotFoundError(
            f"{target} is missing because a process was killed while replacing it. The earlier one is whole, in {previous}: "
            f"rename that to {target.name}"
        )


# -- full disks ------------------------------------------------------------------------------------------------------


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Convert a full-disk error in the block, from any library, to one that names `output`, of which nothing may be left.

    Raises:
        OSError: with the system's error number, and without the name of a temporary file that no longer exists.
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if found := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors raises errors that are not OSError
            number = int(found[1])
        if number not in DISK_FULL:
            raise
        refused = OSError(f"{output} was not written: {os.strerror(number)}; nothing of it is kept")
        refused.errno = number
        raise refused from error

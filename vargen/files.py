"""Atomic writes of files and folders: a process that is killed at any moment leaves the old content or the new, never a mix.

New content is written to a hidden folder `.vargen-*.writing` beside its destination, which a killed process leaves there, and
renamed into place.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vargen.compat import cache_folder as cache_folder

_WEIGHT_FILE = re.compile(r"(?P<stem>[^.]+?)(\.(?P<variant>[^.]+?))?(-\d+-of-\d+)?\.safetensors")
_INDEX_FILE = re.compile(r"(?P<stem>[^.]+?)\.safetensors\.index(\.(?P<variant>[^.]+))?\.json")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def expand_user(path: str | Path, name: str = "path") -> Path:
    """Return `path` with a leading `~` or `~user` replaced by the home folder."""
    if "\0" in str(path):
        raise ValueError(f"{name} must be a path, and no path holds a NUL byte, as {str(path)!r} does")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{name} {str(path)!r} begins with a home folder that is not known; write it in full, or as ./{path} if the name "
            "itself begins with ~"
        ) from None


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path of the same file name; the file written to it replaces `path` only if the block succeeds."""
    with _scratch_folder(path) as scratch:
        temporary = scratch / path.name
        yield temporary
        with open(temporary, "r+b") as written:  # Windows flushes only files that are open for writing
            os.fsync(written.fileno())
        os.replace(temporary, path)


@contextmanager
def _scratch_folder(target: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside `target`, and remove it at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".vargen-", suffix=".writing", dir=target.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# -- folders ---------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `output` if the block succeeds, else it is discarded.

    Raises:
        FileExistsError: `output` exists and is not an empty folder; raised before the block runs.
        OSError: nothing can be written there, raised before the block runs; or the disk is full.
    """
    target = expand_user(output, "output").resolve()
    _restore_previous(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{output} exists and is not empty; choose another folder, or delete it")
    with disk_errors(output), atomic_merge(target) as folder:
        yield folder


@contextmanager
def atomic_merge(folder: Path) -> Iterator[Path]:
    """Yield an empty folder whose files are added to `folder` if the block succeeds; otherwise none of them is.

    Other files in `folder` are kept, except for weights in a file or shards of a network that was written again.
    """
    target = folder.resolve()
    _restore_previous(target)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is not a folder, and nothing can be written in it")
    with _scratch_folder(target) as scratch:
        new = scratch / "new"
        new.mkdir()  # unlike mkdtemp, mkdir follows the umask
        yield new
        previous = previous_folder(target)
        if target.exists():
            _link_kept_files(target, new)
            os.replace(target, previous)
        elif not any(new.iterdir()):
            return  # an empty model folder would look like a model
        try:
            os.replace(new, target)
        finally:
            if previous.exists():
                os.replace(previous, scratch / "old" if target.exists() else target)


def _weight_file_kind(name: str) -> tuple[str, str] | None:
    """Return the stem and variant that a weight file, shard or index belongs to; None for other files."""
    match = _WEIGHT_FILE.fullmatch(name) or _INDEX_FILE.fullmatch(name)
    return match and (match["stem"], match["variant"] or "")


def _link_kept_files(old: Path, new: Path) -> None:
    """Add hard links to `new` for all files in `old` that `new` does not have and whose weights are not in it."""

    def skip(place: str, names: list[str]) -> list[str]:
        folder, copy = Path(place), new / Path(place).relative_to(old)
        written = {_weight_file_kind(file.name) for file in copy.iterdir()} - {None} if copy.is_dir() else set()

        def is_folder_of_both(name: str) -> bool:
            return (copy / name).is_dir() and (folder / name).is_dir() and not (folder / name).is_symlink()

        there = [name for name in names if os.path.lexists(copy / name) and not is_folder_of_both(name)]
        return [*there, *(name for name in names if _weight_file_kind(name) in written)]

    shutil.copytree(old, new, symlinks=True, ignore=skip, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


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
    """Convert a full-disk error in the block, from any library, to one that names `output`, of which nothing may be left."""
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

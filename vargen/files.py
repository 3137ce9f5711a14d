"""Atomic writes: a process that is killed at any moment leaves a file or a new folder whole, or as it was before.

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
from vargen.values import short_repr

_WEIGHTS = re.compile(r"([^.]+?)(?:\.([^.]+?))?(?:-\d+-of-\d+)?\.safetensors|([^.]+?)\.safetensors\.index(?:\.([^.]+))?\.json")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def expand_user(path: str | Path, name: str = "path") -> Path:
    """Return `path` with a leading `~` or `~user` replaced by the home folder."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be text or a path, got {short_repr(path)}")
    if "\0" in str(path):
        raise ValueError(f"{name} must be a path, and no path holds a NUL byte, as {str(path)!r} does")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{name} {str(path)!r} begins with a home folder that is not known; write it in full") from None


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file written to it replaces `path` if the block succeeds."""
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


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `output` if the block succeeds, else it is discarded.

    Raises:
        FileExistsError: `output` exists and is not an empty folder; raised before the block runs.
        OSError: nothing can be written there, raised before the block runs; or the disk is full.
    """
    target = expand_user(output, "output").resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{output} exists and is not empty; choose another folder, or delete it")
    with disk_errors(output), atomic_merge(target) as folder:
        yield folder


@contextmanager
def atomic_merge(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` if the block succeeds, or whose files replace those in it one by one.

    Other files in `folder` are kept, except for weights in a file or shards of a network that was written again.
    """
    target = folder.resolve()
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is not a folder, and nothing can be written in it")
    with _scratch_folder(target) as scratch:
        new = scratch / "new"
        new.mkdir()  # unlike mkdtemp, mkdir follows the umask
        yield new
        if target.exists() and not any(target.iterdir()):
            target.rmdir()
        if not target.exists():
            if any(new.iterdir()):  # an empty model folder would look like a model
                os.replace(new, target)
            return
        for place, _, names in os.walk(new):
            goal = target / Path(place).relative_to(new)
            if goal.is_symlink() and goal != target:  # to what belongs to another model
                goal.unlink()
            goal.mkdir(exist_ok=True)
            for name in names:
                os.replace(Path(place, name), goal / name)
            written = {_network_of(name) for name in names} - {None}
            for old in goal.iterdir() if written else ():
                if old.name not in names and _network_of(old.name) in written:
                    old.unlink()


def _network_of(name: str) -> tuple[str, str] | None:
    """Return the stem and variant that a weight file, shard or index belongs to; None for other files."""
    match = _WEIGHTS.fullmatch(name)
    return match and (match[1] or match[3], match[2] or match[4] or "")


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Convert a full-disk error in the block, from any library, to one that names `output`."""
    try:
        yield
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))  # safetensors raises errors that are not OSError
        number = int(found[1]) if found else getattr(error, "errno", None)
        if number not in DISK_FULL:
            raise
        raise OSError(number, f"{output} was not written: {os.strerror(number)}; nothing of it is kept") from error

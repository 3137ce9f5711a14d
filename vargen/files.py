"""Atomic writes of files and folders: each appears whole or not at all, even if the writing process is killed.

Data being written is kept in a hidden folder `.vargen-*.writing` next to its destination. A killed process leaves it there.
The next write in the same folder removes it or, if the killed process was already moving files into place, finishes the moves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vargen.disk import disk_errors
from vargen.model_files import list_model_files, stale_weight_files

if sys.platform != "win32":
    import fcntl

_PREFIX, _SUFFIX = ".vargen-", ".writing"
_LOCK, _PLAN = "lock", "plan.json"
_ABANDONED_SECONDS = 86400.0  # after this time without changes, a scratch folder of another machine counts as abandoned


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
        said = str(path)
        raise ValueError(
            f"{name} {said!r} begins with a home folder that is not known; write it in full, or as ./{said} if ~ is in its name"
        ) from None


# -- shared by the three kinds of writes ---------------------------------------------------------------------------


def _machine() -> str:
    """Return the scope in which a file lock proves that a process lives: the kernel's boot id, else the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _machine_digest() -> str:
    return hashlib.sha256(_machine().encode()).hexdigest()[:8]


def _lock(file: int, wait: bool) -> bool | None:
    """Return whether this process now holds the lock; None if the system or the file system has no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yield a new hidden folder in `folder` and remove it at the end; first clean up those that killed processes left there.

    The system releases the lock of a process exactly when that process ends. A process id in the name would be weaker: ids are
    reused, and mean nothing in another container. On a shared file system a lock may not hold across machines, so the folder's
    name includes the machine: it is there from the start, whenever a process is killed.
    """
    _clear(folder)
    space, lock = _new_scratch(folder)
    try:
        yield space
    finally:
        if not (space / _PLAN).exists():  # otherwise it holds the only copies of files that could not be moved back
            _remove(space, lock)
        else:
            os.close(lock)


def _new_scratch(folder: Path) -> tuple[Path, int]:
    """Create a hidden folder in `folder` with its lock, held by this process where locks are supported."""
    while True:
        space = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_machine_digest()}-", suffix=_SUFFIX, dir=folder))
        try:
            lock = os.open(space / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        except FileNotFoundError:
            continue  # another process took it for abandoned, which it may until the folder is locked
        except BaseException:
            shutil.rmtree(space, ignore_errors=True)
            raise
        _lock(lock, wait=True)  # lets other processes see that the folder is in use
        if _is_file(space / _LOCK, lock):
            return space, lock
        os.close(lock)


def _is_file(path: Path, file: int) -> bool:
    """Return whether `path` is still the opened file: neither replaced by another nor deleted."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _remove(space: Path, lock: int) -> None:
    if sys.platform == "win32":  # Windows does not delete open files
        os.close(lock)
    shutil.rmtree(space, ignore_errors=True)
    if sys.platform != "win32":
        os.close(lock)


def _clear(folder: Path) -> None:
    """Remove what killed processes left in `folder`, after finishing the moves that they had begun."""
    try:
        left = [Path(entry.path) for entry in os.scandir(folder) if _is_scratch(entry)]
    except OSError:
        return  # whatever is wrong with the folder, the write itself will report it
    for space in left:
        with contextlib.suppress(OSError, ValueError, KeyError):  # another process is clearing it, or another user owns it
            touched = max(path.lstat().st_mtime for path in (space, *space.rglob("*")))
            lock = os.open(space / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                dead = _is_dead(space, lock, touched)
                if dead and (space / _PLAN).exists():
                    _move(space)
            except BaseException:
                os.close(lock)
                raise
            if dead:
                _remove(space, lock)
            else:
                os.close(lock)


def _is_scratch(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX) and entry.is_dir(follow_symlinks=False)


def _is_dead(space: Path, lock: int, touched: float) -> bool:
    """Return whether the process that made a scratch folder has ended; if so, this process now holds its lock, where supported.

    Args:
        touched: time of the last change in the folder, in seconds since the epoch.
    """
    free = _lock(lock, wait=False)
    here = space.name.startswith(f"{_PREFIX}{_machine_digest()}-")
    if free and not _is_file(space / _LOCK, lock):
        return False  # a deleted lock says nothing about the one that replaced it
    return free is not False and ((free and here) or time.time() - touched > _ABANDONED_SECONDS)


def _commit(space: Path, goes: Iterable[str], first: str = "model_index.json") -> None:
    """Move the files in `space / "new"` into the folder that contains `space`, and delete the names in `goes` from that folder.

    Either everything happens or nothing. If the process is killed during the moves, the next write in the folder finishes
    them. `first` is removed first and added last, so that a mix of two models cannot be opened meanwhile.
    """
    new, target = space / "new", space.parent
    comes = sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_symlink() or not path.is_dir())
    leave = {*goes, *(name for name in comes if os.path.lexists(target / name))}
    plan = {
        "goes": sorted(leave, key=lambda name: (name != first, name)),  # a link comes before the files reached through it
        "folders": sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_dir()),
        "comes": sorted(comes, key=lambda name: name == first),
    }
    with open(space / "draft", "w", encoding="utf-8") as draft:
        json.dump(plan, draft)
        draft.flush()
        os.fsync(draft.fileno())
    os.replace(space / "draft", space / _PLAN)
    try:
        _move(space)
    except BaseException:
        _move_back(space)
        raise


def _plan_of(space: Path) -> tuple[list[str], list[str], list[str]]:
    plan = json.loads((space / _PLAN).read_text(encoding="utf-8"))
    return plan["goes"], plan["folders"], plan["comes"]


def _move(space: Path) -> None:
    """Carry out the plan, skipping steps that are already done."""
    goes, folders, comes = _plan_of(space)
    target, new, old = space.parent, space / "new", space / "old"
    for name in goes:
        if os.path.lexists(target / name) and not os.path.lexists(old / name):
            (old / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(target / name, old / name)
    for name in folders:
        (target / name).mkdir(exist_ok=True)
    for name in comes:
        if os.path.lexists(new / name):
            os.replace(new / name, target / name)
    for folder in {(target / name).parent for name in goes} - {target}:
        with contextlib.suppress(OSError):
            folder.rmdir()  # a component that the new model lacks, unless it holds files of the user
    (space / _PLAN).unlink()


def _move_back(space: Path) -> None:
    """Undo the steps of the plan that were done."""
    goes, folders, comes = _plan_of(space)
    target, new, old = space.parent, space / "new", space / "old"
    for name in comes:
        if os.path.lexists(target / name) and not os.path.lexists(new / name):
            os.replace(target / name, new / name)
    for name in reversed(folders):
        with contextlib.suppress(OSError):
            (target / name).rmdir()
    for name in reversed(goes):
        if os.path.lexists(old / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(old / name, target / name)
    (space / _PLAN).unlink()


# -- three kinds of atomic writes ------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of downloads, data sets and measurements: `$VARGEN_CACHE`, or `~/.cache/vargen`."""
    return Path(os.environ.get("VARGEN_CACHE") or Path.home() / ".cache" / "vargen")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path of the same file name; the file written to it replaces `path` only if the block succeeds.

    Raises:
        OSError: the folder cannot be created or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(path.parent) as space:
        (space / "new").mkdir()
        temporary = space / "new" / path.name
        yield temporary
        with open(temporary, "r+b") as written:  # Windows flushes only files that are open for writing
            os.fsync(written.fileno())
        os.replace(temporary, path)


@contextmanager
def atomic_merge(folder: Path) -> Iterator[Path]:
    """Yield an empty folder whose files are moved into `folder` if the block succeeds; otherwise none of them is.

    Other files in `folder` are kept, except for shards of weights that were rewritten.

    Raises:
        OSError: the folder cannot be created or written; raised before the block runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _scratch(folder) as space:
            new = space / "new"
            new.mkdir()
            yield new
            _commit(space, [str(file.relative_to(folder)) for file in stale_weight_files(new, folder)])
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()  # an empty model folder would look like a model


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
    beside = next((parent for parent in target.parents if parent.exists()), target)  # the root has no parents
    for folder in (target, beside):
        _clear(folder)
    old = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if old and not overwrite:
        raise FileExistsError(f"{output} exists and is not empty; choose another folder, or overwrite it")
    if old and not (target / "model_index.json").is_file():
        raise FileExistsError(f"{output} is not a model folder, so it is not overwritten; choose another")
    if old and any(path.resolve().is_relative_to(target) for path in inputs):
        raise FileExistsError(f"{output} holds what is to be converted; choose another folder")
    # Inside the target or next to it, so that the final move is a rename. Missing parents are created at the end.
    there = target.is_dir()
    with contextlib.ExitStack() as stack:
        stack.enter_context(disk_errors(output))
        try:
            space = stack.enter_context(_scratch(target if there else beside))
            folder = space / "new"
            folder.mkdir()  # unlike mkdtemp, mkdir follows the umask
        except OSError as error:
            raise OSError(f"cannot write {output}: {error}") from error
        yield folder
        if there:
            _commit(space, list_model_files(target, folder))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder, target)

"""Files and folders that appear whole or not at all, whatever stops the process that writes them.

What is being written lies in a hidden folder `.vargen-*.writing` beside its place. A process that is killed leaves it there;
the next write in the same folder takes it away, or finishes it where the killed one was already moving files to their places.
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
from vargen.model_files import model_files, stale_weight_files

if sys.platform != "win32":
    import fcntl

_PREFIX, _SUFFIX = ".vargen-", ".writing"
_LOCK, _PLAN = "lock", "plan.json"
_ABANDONED_SECONDS = 86400.0  # untouched for so long, what another machine was writing is taken for abandoned


def expand_user(path: str | Path, name: str = "path") -> Path:
    """`path` with the home folder for a leading `~` or `~user`.

    Raises:
        ValueError: naming the argument, where there is no such user, or for a NUL byte.
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


# -- what the three ways to write share ----------------------------------------------------------------------------


def _machine() -> str:
    """Within it, a file lock tells surely whether a process lives: a boot of a kernel; its name where no boot is known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _machine_digest() -> str:
    return hashlib.sha256(_machine().encode()).hexdigest()[:8]


def _lock(file: int, wait: bool) -> bool | None:
    """Whether this process has the lock now; None where the system or the file system has no locks."""
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
    """Yield a new hidden folder in `folder`, which goes at the end; before it, those that killed processes left there.

    The system frees the lock of a killed process, and of no other. A process id in the name would be less: ids are used again,
    and mean nothing in another container. A lock may mean nothing on another machine of a shared file system, so the machine
    is in the folder's name: there from the first moment to the last, wherever a process is killed.
    """
    _clear(folder)
    space, lock = _new_scratch(folder)
    try:
        yield space
    finally:
        if not (space / _PLAN).exists():  # else it holds the only copies of files that could not be put back
            _remove(space, lock)
        else:
            os.close(lock)


def _new_scratch(folder: Path) -> tuple[Path, int]:
    """A new hidden folder in `folder` with its lock, which this process has where there are locks."""
    while True:
        space = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_machine_digest()}-", suffix=_SUFFIX, dir=folder))
        try:
            lock = os.open(space / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        except FileNotFoundError:
            continue  # another process took it for a killed one's, as it may until it is locked
        except BaseException:
            shutil.rmtree(space, ignore_errors=True)
            raise
        _lock(lock, wait=True)  # for one who looks whether it is abandoned
        if _is_file(space / _LOCK, lock):
            return space, lock
        os.close(lock)


def _is_file(path: Path, file: int) -> bool:
    """Whether `path` is the file that was opened, not another that has taken its place, nor gone."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _remove(space: Path, lock: int) -> None:
    if sys.platform == "win32":  # which keeps files that are open
        os.close(lock)
    shutil.rmtree(space, ignore_errors=True)
    if sys.platform != "win32":
        os.close(lock)


def _clear(folder: Path) -> None:
    """Take away what killed processes left in `folder`; what they were already moving to its place gets there first."""
    try:
        left = [Path(entry.path) for entry in os.scandir(folder) if _is_scratch(entry)]
    except OSError:
        return  # whatever is wrong with it, the write will say
    for space in left:
        with contextlib.suppress(OSError, ValueError, KeyError):  # another process clears it, or it is another user's
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
    """Whether the process that made a scratch folder is gone; then this process has its lock, where there are locks.

    Args:
        touched: seconds since the epoch; when something in it was last changed.
    """
    free = _lock(lock, wait=False)
    here = space.name.startswith(f"{_PREFIX}{_machine_digest()}-")
    if free and not _is_file(space / _LOCK, lock):
        return False  # a lock that is gone tells nothing of the one that has taken its place
    return free is not False and ((free and here) or time.time() - touched > _ABANDONED_SECONDS)


def _commit(space: Path, goes: Iterable[str], first: str = "model_index.json") -> None:
    """Let the files in `space / "new"` take their places in the folder that holds `space`, and `goes`, names in it, go.

    Either all of it happens or nothing, unless the process is killed amid the moves: then the next write in the folder goes on
    with them. `first` goes first and comes last, so that meanwhile nothing opens a mix of two models.
    """
    new, target = space / "new", space.parent
    comes = sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_symlink() or not path.is_dir())
    leave = {*goes, *(name for name in comes if os.path.lexists(target / name))}
    plan = {
        "goes": sorted(leave, key=lambda name: (name != first, name)),  # a link before what is seen through it
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
    """Carry out the plan; what was done of it already is not done again."""
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
            folder.rmdir()  # a part that the new model lacks, if nothing of the user's is in it
    (space / _PLAN).unlink()


def _move_back(space: Path) -> None:
    """Undo what was done of the plan."""
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


# -- the three ways to write -----------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where downloads, data sets and measurements are kept: `$VARGEN_CACHE`, or `~/.cache/vargen`."""
    return Path(os.environ.get("VARGEN_CACHE") or Path.home() / ".cache" / "vargen")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path of the same name to write, which takes the place of `path` only if the block succeeds.

    Raises:
        OSError: if the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(path.parent) as space:
        (space / "new").mkdir()
        temporary = space / "new" / path.name
        yield temporary
        with open(temporary, "r+b") as written:  # Windows flushes only what is open for writing
            os.fsync(written.fileno())
        os.replace(temporary, path)


@contextmanager
def atomic_merge(folder: Path) -> Iterator[Path]:
    """Yield an empty folder whose files take their places under `folder` when the block ends well; if not, none does.

    Others that `folder` holds stay, but for shards of weights that were written anew.

    Raises:
        OSError: if the folder cannot be made or written; before the block runs.
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
    """An empty folder whose model takes the place of the one in `output` when the block ends well, else vanishes.

    Args:
        output: made with its parents; or the model in it is replaced, and whatever else it holds stays.
        inputs: what the block reads; none may lie in `output` if that is replaced.
        overwrite: whether a folder that holds a `model_index.json` may be written to. Any other never is, unless it is empty.

    Raises:
        FileExistsError: `output` is there and may not be replaced.
        OSError: nothing can be written there. Both before the block runs; or the disk is full.
    """
    target = expand_user(output, "output").resolve()
    beside = next((parent for parent in target.parents if parent.exists()), target)  # the root has none
    for folder in (target, beside):
        _clear(folder)
    old = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if old and not overwrite:
        raise FileExistsError(f"{output} exists and is not empty; choose another folder, or overwrite it")
    if old and not (target / "model_index.json").is_file():
        raise FileExistsError(f"{output} is not a model folder, so it is not overwritten; choose another")
    if old and any(path.resolve().is_relative_to(target) for path in inputs):
        raise FileExistsError(f"{output} holds what is to be converted; choose another folder")
    # In the target, or beside it, so that taking places is a rename. Missing parents are made at the end.
    there = target.is_dir()
    with contextlib.ExitStack() as stack:
        stack.enter_context(disk_errors(output))
        try:
            space = stack.enter_context(_scratch(target if there else beside))
            folder = space / "new"
            folder.mkdir()  # unlike mkdtemp's, open to whom the umask lets in
        except OSError as error:
            raise OSError(f"cannot write {output}: {error}") from error
        yield folder
        if there:
            _commit(space, model_files(target, folder))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder, target)

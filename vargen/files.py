"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Where downloads, data sets and measurements are kept: `$VARGEN_CACHE`, or `~/.cache/vargen`."""
    return Path(os.environ.get("VARGEN_CACHE") or Path.home() / ".cache" / "vargen")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that takes its place only if the block succeeds.

    Raises:
        OSError: if the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "r+b") as written:  # Windows flushes only what is open for writing
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """Yield an empty folder whose files take their places under `folder` when the block ends well; if not, none does.

    Each file appears whole. Others that `folder` holds stay, but for shards of weights that were written anew.

    Raises:
        OSError: if the folder cannot be made or written; before the block runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as space:
            yield Path(space)
            outdated = _replaced_weights(Path(space), folder)
            for file in sorted(path for path in Path(space).rglob("*") if path.is_file()):
                place = folder / file.relative_to(space)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, place)
            for file in outdated:
                file.unlink()
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()  # an empty model folder would look like a model


_WEIGHT_FILE = re.compile(r"(?P<stem>[^.]+?)(\.(?P<variant>[^.]+?))?(-\d+-of-\d+)?\.safetensors")
_INDEX_FILE = re.compile(r"(?P<stem>[^.]+?)\.safetensors\.index(\.(?P<variant>[^.]+))?\.json")


def _weights_of(file: Path) -> tuple[str, ...] | None:
    """Stem and variant that a weight file, shard or index belongs to; None for other files."""
    match = _WEIGHT_FILE.fullmatch(file.name) or _INDEX_FILE.fullmatch(file.name)
    return match and (match["stem"], match["variant"] or "")


def _replaced_weights(written: Path, folder: Path) -> list[Path]:
    """Weight files, shards and indices under `folder` that belong to weights newly in `written`, and are not among its files.

    One file beside shards of the same name holds other weights, and which of the two is opened differs by library.
    """
    stale: list[Path] = []
    for part in {file.parent.relative_to(written) for file in written.rglob("*.safetensors")}:
        names = {file.name for file in (written / part).iterdir()}
        kinds = {_weights_of(Path(name)) for name in names} - {None}
        there = (folder / part).iterdir() if (folder / part).is_dir() else ()
        stale += [file for file in there if file.name not in names and _weights_of(file) in kinds]
    return stale


@contextmanager
def whole_folder(output: Path, inputs: list[Path], overwrite: bool) -> Iterator[Path]:
    """An empty folder that takes the place of `output` when the block ends well, else vanishes.

    Args:
        output: made with its parents, or replaced.
        inputs: what the block reads; none may lie in a folder that is replaced.
        overwrite: whether a folder that holds a `model_index.json` may be replaced. Any other never is.

    Raises:
        FileExistsError: `output` is there and may not be replaced.
        OSError: nothing can be written there. Both before the block runs.
    """
    target = output.expanduser().resolve()
    old = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if old and not overwrite:
        raise FileExistsError(f"{output} exists and is not empty; choose another folder, or overwrite it")
    if old and not (target / "model_index.json").is_file():
        raise FileExistsError(f"{output} is not a model folder, so it is not overwritten; choose another")
    if old and any(path.resolve().is_relative_to(target) for path in inputs):
        raise FileExistsError(f"{output} holds what is to be converted; choose another folder")
    # Beside the target, so that taking its place is a rename. Missing parents are made at the end.
    beside = next(parent for parent in target.parents if parent.exists())
    try:
        space = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=beside))
    except OSError as error:
        raise OSError(f"cannot write {output}: {error}") from error
    try:
        folder = space / "new"
        folder.mkdir()  # unlike mkdtemp's, open to whom the umask lets in
        yield folder
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            os.replace(target, space / "old")
        try:
            os.replace(folder, target)
        except OSError:
            if (space / "old").exists():
                os.replace(space / "old", target)
            raise
    finally:
        shutil.rmtree(space, ignore_errors=True)

"""Run directories, and their append-only journals of JSON lines, which survive a kill at any moment and a full disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vargen.files import DISK_FULL, atomic_file
from vargen.reading import open_regular
from vargen.values import parse_float, parse_int, short_repr

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger("vargen")

Record = dict[str, Any]


class Journal:
    """A journal open for appending by this process only, until `close` or the end of the process.

    A line that a killed process left incomplete is truncated.

    Raises:
        ValueError: another process has it open, or the path is not a regular file.
        OSError: it cannot be opened or created.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} must be a regular file, and is something else; move it away")
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            self._claim()
            self._mend()
        except BaseException:
            os.close(self._file)
            raise

    def _claim(self) -> None:
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when a process is killed
        except BlockingIOError:
            raise ValueError(
                f"{self.path} is being written by another process; wait for it, or give each process a --shard of its own"
            ) from None
        except OSError:  # a file system without locks
            logger.info("%s cannot be locked; see that no other process writes it", self.path)

    def _mend(self) -> None:
        size = os.fstat(self._file).st_size
        whole = size
        while whole and self._byte(whole - 1) != b"\n":
            whole -= 1
        if whole < size:
            logger.warning("%s ended within a line, of which %d bytes are cut off", self.path, size - whole)
            os.ftruncate(self._file, whole)
            os.fsync(self._file)

    def _byte(self, place: int) -> bytes:
        os.lseek(self._file, place, os.SEEK_SET)
        return os.read(self._file, 1)

    def append(self, *records: Record) -> None:
        """Append the records, one line each, all of them or none, and flush them to disk.

        Raises:
            OSError: they cannot be written; then the file is unchanged.
        """
        data = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
        before = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: Path, whole: Callable[[Record], bool] | None = None) -> list[Record]:
    """Return the records of a file. An unreadable line is skipped with a warning: the work it recorded is done again.

    Args:
        whole: whether a record is complete; incomplete ones are skipped, too.

    Raises:
        ValueError: the path is not a regular file.
    """
    records = []
    try:
        with open_regular(path) as opened:
            lines = opened.read().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and (whole is None or whole(record)):
            records.append(record)
        else:
            logger.warning("line %d of %s is damaged and passed over", number, path)
    return records


RUN_FILE = "run.json"
_PER_FOLDER = 1000  # files; more slow a folder down
_GROWS = ("num",)  # settings that may be larger when a run is resumed
_MEASURES = ("seconds", "tokens", "turns", "passes", "relaxation")  # measurements of an image
_MOST = 1e9  # upper bound of each; thirty years, in seconds


@dataclass(frozen=True)
class RunFolder:
    """Paths and state of the run directory `path`."""

    path: Path

    def image(self, method: str, item: int) -> str:
        """Return the path of an image file, relative to the run directory."""
        return f"images/{file_slug(method)}/{item // _PER_FOLDER:03d}/{item:08d}.png"

    def journal(self, shard: int, shards: int) -> Path:
        """Return the manifest path of a shard. Raises ValueError if a file is in the place of the manifest folder."""
        return self._manifests() / f"shard-{shard}-of-{shards}.jsonl"

    def settings(self) -> dict[str, Any]:
        """Return the settings that `claim` wrote.

        Raises:
            ValueError: the folder holds no run, or a damaged one.
        """
        file = self.path / RUN_FILE
        if not file.is_file():
            raise ValueError(f"{str(self.path)!r} holds no {RUN_FILE}, so it is not a run of vargen")
        try:
            held = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); give another folder") from error
        parts = {"methods": dict, "subjects": list, "num": int}
        if not isinstance(held, dict) or not all(isinstance(held.get(name), kind) for name, kind in parts.items()):
            raise ValueError(f"{file} does not describe a run; give another folder")
        return held

    def claim(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Start a run with the settings `asked` in the folder, or resume the run that it holds; returns the run's settings.

        A run may be resumed with more methods and more images. All other settings determine its images and must be equal.

        Raises:
            ValueError: it holds a run with other settings, which are named, or other files; the folder is then unchanged.
            OSError: it cannot be written.
        """
        from vargen.decoding.method import same_spec  # imports torch, which reading a run does not need

        asked = json.loads(json.dumps(asked))
        held: dict[str, Any] = {}
        if (self.path / RUN_FILE).exists():
            held = self.settings()
            fixed = [key for key in asked if key not in (*_GROWS, "methods")]
            wrong = [f"{key} {_short(held.get(key))}, now {_short(asked[key])}" for key in fixed if held.get(key) != asked[key]]
            wrong += [
                f"method {name} was {_short(held['methods'][name])}, now {_short(spec)}"
                for name, spec in asked["methods"].items()
                if not same_spec(held["methods"].get(name, spec), spec)
            ]
            if wrong:
                told = "; ".join(wrong)
                raise ValueError(f"output {str(self.path)!r} holds a run of other settings: {told}. Give another folder")
        elif self.path.is_dir() and any(each for each in self.path.iterdir() if not each.name.startswith(".")):
            raise ValueError(f"output {str(self.path)!r} holds other files and no run; give a folder that is new or empty")
        names = {file_slug(name) for name in (*held.get("methods", {}), *asked["methods"])}
        if len(names) < len({*held.get("methods", {}), *asked["methods"]}):
            raise ValueError(f"methods need names that differ in letters and digits, got {', '.join(asked['methods'])}")
        merged = {**held, **asked, "methods": {**held.get("methods", {}), **asked["methods"]}}
        merged["num"] = max(asked["num"], held.get("num", 0))
        if merged != held:
            try:
                with atomic_file(self.path / RUN_FILE) as temporary:
                    temporary.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                raise cannot_write(RUN_FILE, error) from error
        return merged

    def records(self) -> dict[tuple[str, int], Record]:
        """Return the last record of each image, by method and index, from the manifests of all shards."""
        found: dict[tuple[str, int], Record] = {}
        for file in sorted(self._manifests().glob("*.jsonl")):
            for record in read_journal(file, _whole):
                found[record["method"], record["item"]] = record
        return found

    def _manifests(self) -> Path:
        folder = self.path / "manifest"
        if os.path.lexists(folder) and not folder.is_dir():
            raise ValueError(f"{str(folder)!r} must be a folder, and is a file; move it away, or give another run")
        return folder

    def drawn(self) -> dict[tuple[str, int], Record]:
        """Return the images whose files exist and match the digests in the manifest."""
        return {key: record for key, record in self.records().items() if self.intact(record)}

    def intact(self, record: Record) -> bool:
        """Return whether the image of a manifest record is in its place and unchanged."""
        file = self.path / self.image(record["method"], record["item"])
        try:
            return file_digest(file) == record.get("sha256")
        except OSError:
            return False


def _whole(record: Record) -> bool:
    """Return whether a manifest record has all required fields of an image, with plausible values."""
    numbers = [parse_float(record.get(name)) for name in _MEASURES]
    counts = [parse_int(record.get(name), least, int(_MOST)) for name, least in (("item", 0), ("batch", 1), ("threads", 1))]
    return (
        isinstance(record.get("method"), str)
        and isinstance(record.get("sha256"), str)
        and isinstance(record.get("text", ""), str)
        and None not in counts
        and all(number is not None and 0 <= number <= _MOST for number in numbers)
    )


def cannot_write(what: str, error: OSError) -> OSError:
    """Return the error for a run file that cannot be written, with advice that fits the cause."""
    reason = error.strerror or str(error)
    remedy = "make room" if error.errno in DISK_FULL else "give a folder that can be written, or mend this one,"
    return OSError(f"{what} was not written ({reason}). Nothing is lost: {remedy} and give the same command, which goes on")


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal. Raises OSError for anything else."""
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def folder_digest(files: Iterable[Path]) -> str:
    """Return sixteen hexadecimal digits that change with the name or content of any of the files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {file_digest(file)}\n".encode())
    return digest.hexdigest()[:16]


def file_slug(name: str) -> str:
    """Convert the name of a method or instrument to a file name: `gsd:budget=5` becomes `gsd-budget-5`."""
    return re.sub("[^A-Za-z0-9.]+", "-", name).strip("-.")[:100] or "unnamed"


def _short(value: Any) -> str:
    return short_repr(value)

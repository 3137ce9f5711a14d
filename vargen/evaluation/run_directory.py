"""An append-only file of JSON lines that survives a kill at any moment and a full disk: what a line says has happened."""

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

from vargen.disk import FULL
from vargen.files import atomic_file
from vargen.reading import open_regular
from vargen.values import parse_float, parse_int, short_repr

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger("vargen")

Record = dict[str, Any]


class Journal:
    """Open for appending by this process alone, until `close` or its end.

    A line that a killed process left half-written is cut off.

    Raises:
        ValueError: where another process has it open, or something else than a regular file lies there.
        OSError: if it cannot be opened or made.
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
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which a killed process holds no longer
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
        """Write the records, a line each, all of them or none, and wait until the disk has them.

        Raises:
            OSError: if they cannot be written; then the file is as it was.
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
    """The records of a file; a line that cannot be read is named in a warning and passed over: what it said is done again.

    Args:
        whole: whether a record says all that it should; one that does not is passed over, too.

    Raises:
        ValueError: for something else than a regular file.
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
_PER_FOLDER = 1000  # files; more make a folder slow
_GROWS = ("num",)  # settings of which a run may have more than before
_MEASURES = ("seconds", "tokens", "turns", "passes", "relaxation")  # of a picture
_MOST = 1e9  # of any of them: thirty years, for seconds


@dataclass(frozen=True)
class RunFolder:
    """Paths and state of the run in `path`."""

    path: Path

    def image(self, method: str, item: int) -> str:
        """Name of a picture's file, within the folder."""
        return f"images/{file_slug(method)}/{item // _PER_FOLDER:03d}/{item:08d}.png"

    def journal(self, shard: int, shards: int) -> Path:
        """The manifest of a shard. Raises ValueError where its folder is something else."""
        return self._manifests() / f"shard-{shard}-of-{shards}.jsonl"

    def settings(self) -> dict[str, Any]:
        """What `claim` wrote.

        Raises:
            ValueError: if the folder holds no run, or a damaged one.
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
        """Make the folder a run of the settings `asked`, or go on with the run that it holds; returns the run's settings.

        A run may go on with more methods and more pictures. Everything else decides what its pictures are.

        Raises:
            ValueError: if it holds a run of other settings, naming them, or other files; then it is left as it is.
            OSError: if it cannot be written.
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
        """The last line about each picture, by method and item, from all shards' manifests."""
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
        """Those whose file is there and is what the manifest says, byte by byte."""
        return {key: record for key, record in self.records().items() if self.intact(record)}

    def intact(self, record: Record) -> bool:
        """Whether the picture of a manifest's line lies where it should and has not changed."""
        file = self.path / self.image(record["method"], record["item"])
        try:
            return file_digest(file) == record.get("sha256")
        except OSError:
            return False


def _whole(record: Record) -> bool:
    """Whether a manifest's line says what it should of a picture, in numbers that can be."""
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
    """The error for a file of a run that cannot be written; its advice fits the reason."""
    reason = error.strerror or str(error)
    remedy = "make room" if error.errno in FULL else "give a folder that can be written, or mend this one,"
    return OSError(f"{what} was not written ({reason}). Nothing is lost: {remedy} and give the same command, which goes on")


def file_digest(file: Path) -> str:
    """SHA-256 of a regular file, in hexadecimal. Raises OSError for anything else."""
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def folder_digest(files: Iterable[Path]) -> str:
    """Sixteen digits that change with the name or the content of any of the files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {file_digest(file)}\n".encode())
    return digest.hexdigest()[:16]


def file_slug(name: str) -> str:
    """A file name's worth of a method's or an instrument's name: `gsd:budget=5` is `gsd-budget-5`."""
    return re.sub("[^A-Za-z0-9.]+", "-", name).strip("-.")[:100] or "unnamed"


def _short(value: Any) -> str:
    return short_repr(value)

"""Run directories, and their append-only manifests of JSON lines, which survive a kill at any moment and a full disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vargen.files import DISK_FULL, atomic_file
from vargen.reading import open_regular
from vargen.values import short_repr

logger = logging.getLogger("vargen")

Record = dict[str, Any]


class ManifestWriter:
    """A manifest open for appending by this process only, until `close` or the end of the process.

    A line that a killed process left incomplete is truncated.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} must be a regular file; move it away")
        self._lock = FileLock(path.with_name(f".{path.stem}.lock"))  # released when a process is killed
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"{path} is being written by another process; wait for it, or give each process a --shard of its own"
            ) from None
        except NotImplementedError:  # a file system without locks
            logger.info("%s cannot be locked; make sure that no other process writes it", path)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            self._truncate_partial_line()
        except BaseException:
            self.close()
            raise

    def _truncate_partial_line(self) -> None:
        size = os.fstat(self._file).st_size
        whole = self.path.read_bytes().rfind(b"\n") + 1
        if whole < size:
            logger.warning("%s ended within a line, of which %d bytes are cut off", self.path, size - whole)
            os.ftruncate(self._file, whole)
            os.fsync(self._file)

    def append(self, *records: Record) -> None:
        """Append the records, one line each, all of them or none, and flush them to disk."""
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
        self._lock.release()

    def __enter__(self) -> ManifestWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_manifest(path: Path) -> list[Record]:
    """Return the records of a file. An unreadable line is skipped with a warning: the work it recorded is done again."""
    records = []
    try:
        with open_regular(path) as opened:
            lines = opened.read().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        try:
            if line:
                records.append(json.loads(line))
        except ValueError:
            logger.warning("line %d of %s is damaged and skipped", number, path)
    return records


RUN_FILE, MEASUREMENTS, LOG_FILE = "run.json", "measurements", "log.txt"
_LOG_SECONDS = 60
_PER_FOLDER = 1000  # files; more slow a folder down
_EXTENDABLE = ("num",)  # settings that may be larger when a run is resumed


@dataclass(frozen=True)
class RunDirectory:
    """Paths and state of the run directory `path`."""

    path: Path

    def image(self, method: str, index: int) -> str:
        """Return the path of an image file, relative to the run directory."""
        return f"images/{to_file_name(method)}/{index // _PER_FOLDER:03d}/{index:08d}.png"

    def manifest_path(self, shard: int, shards: int) -> Path:
        """Return the manifest path of a shard."""
        return self.path / "manifest" / f"shard-{shard}-of-{shards}.jsonl"

    def settings(self) -> dict[str, Any]:
        """Return the settings that `open_or_create` wrote."""
        file = self.path / RUN_FILE
        if not file.is_file():
            raise ValueError(f"{str(self.path)!r} holds no {RUN_FILE}, so it is not a run directory of vargen")
        try:
            held = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); give another folder") from error
        if not isinstance(held, dict) or not isinstance(held.get("methods"), dict):
            raise ValueError(f"{file} does not describe a run; give another folder")
        return held

    def open_or_create(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Start a run with the given settings in the folder, or resume the run that it holds; returns the run's settings.

        A run may be resumed with more methods and more images. All other settings determine its images and must be equal.
        """

        settings = json.loads(json.dumps(settings))
        stored: dict[str, Any] = {}
        if (self.path / RUN_FILE).exists():
            stored = self.settings()
            fixed = [key for key in settings if key not in (*_EXTENDABLE, "methods")]
            pairs = {key: (stored.get(key), settings[key]) for key in fixed if stored.get(key) != settings[key]}
            for name, spec in settings["methods"].items():
                if stored["methods"].get(name, spec) != spec:
                    pairs[f"method {name}"] = stored["methods"][name], spec
            if pairs:
                listed = "; ".join(f"{key} was {short_repr(old)}, now {short_repr(new)}" for key, (old, new) in pairs.items())
                raise ValueError(f"output {str(self.path)!r} holds a run of other settings: {listed}. Give another folder")
        elif self.path.is_dir() and any(each for each in self.path.iterdir() if not each.name.startswith(".")):
            raise ValueError(f"output {str(self.path)!r} holds other files and no run; give a folder that is new or empty")
        methods = {**stored.get("methods", {}), **settings["methods"]}
        if len({to_file_name(name) for name in methods}) < len(methods):
            raise ValueError(f"methods need names that differ in letters and digits, got {', '.join(settings['methods'])}")
        merged = {**stored, **settings, "methods": methods, "num": max(settings["num"], stored.get("num", 0))}
        if merged != stored:
            try:
                with atomic_file(self.path / RUN_FILE) as temporary:
                    temporary.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                raise describe_write_error(RUN_FILE, error) from error
        return merged

    @contextmanager
    def log(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Append to `log.txt` how far a process is: at its start, once a minute, and at its end, also an interruption.

        Yields a function of the number of images that exist, of `total`.
        """
        done, said = 0, -math.inf

        def write(text: str) -> None:
            time_now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError), open(self.path / LOG_FILE, "a", encoding="utf-8") as file:
                file.write(f"{time_now} UTC, {what}: {done} of {total} images{text}\n")

        def update(count: int) -> None:
            nonlocal done, said
            done = count
            if time.monotonic() > said + _LOG_SECONDS:
                write("")
                said = time.monotonic()

        try:
            yield update
        except BaseException as error:
            write(f"; stopped by {type(error).__name__}")
            if isinstance(error, KeyboardInterrupt):
                logger.warning("%d of %d images are there; the same command resumes", done, total)
            raise
        write("; finished")

    def records(self) -> dict[tuple[str, int], Record]:
        """Return the last record of each image, by method and index, from the manifests of all shards."""
        found: dict[tuple[str, int], Record] = {}
        for file in sorted((self.path / "manifest").glob("*.jsonl")):
            for record in read_manifest(file):
                found[record["method"], record["index"]] = record
        return found

    def complete_records(self) -> dict[tuple[str, int], Record]:
        """Return the images whose files exist and match the digests in the manifest."""
        return {key: record for key, record in self.records().items() if self.is_intact(record)}

    def is_intact(self, record: Record) -> bool:
        """Return whether the image of a manifest record is in its place and unchanged."""
        file = self.path / self.image(record["method"], record["index"])
        try:
            return file_digest(file) == record.get("sha256")
        except OSError:
            return False


def describe_write_error(what: str, error: OSError) -> OSError:
    """Return the error for a run file that cannot be written, with advice that fits the cause."""
    reason = error.strerror or str(error)
    remedy = "make room" if error.errno in DISK_FULL else "make this folder writable, or give another one,"
    return OSError(f"{what} was not written ({reason}). Nothing is lost: {remedy} and run the same command again to resume")


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal. Raises OSError for anything else."""
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def hash_files(files: Iterable[Path]) -> str:
    """Return sixteen hexadecimal digits that change with the name or content of any of the files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {file_digest(file)}\n".encode())
    return digest.hexdigest()[:16]


def to_file_name(name: str) -> str:
    """Convert the name of a method or instrument to a file name: `gsd:budget=5` becomes `gsd-budget-5`."""
    return re.sub("[^A-Za-z0-9.]+", "-", name).strip("-.")[:100] or "unnamed"

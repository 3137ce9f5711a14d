"""An append-only file of JSON lines that survives a kill at any moment and a full disk: what a line says has happened."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vargen.reading import open_regular

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

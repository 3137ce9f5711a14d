"""One error message for a full disk, whichever library was writing."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Convert a full-disk error in the block to one that names `output`. The block must not leave partly written files.

    Raises:
        OSError: with the system's error number, and without the name of a temporary file that no longer exists.
    """
    try:
        yield
    except Exception as error:
        number = _number(error)
        if number not in FULL:
            raise
        refused = OSError(f"{output} was not written: {os.strerror(number)}; nothing of it is kept")
        refused.errno = number
        raise refused from error


def _number(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    told = re.search(r"\(os error (\d+)\)", str(error))  # safetensors raises errors that are not OSError
    return int(told[1]) if told else None

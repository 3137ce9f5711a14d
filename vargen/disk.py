"""A full disk, said in one way whichever library was writing."""

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
    """Let a full disk in the block, which keeps nothing that is half written, be an error that names `output`.

    Raises:
        OSError: with the system's number, and without the name of a file that is gone.
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
    told = re.search(r"\(os error (\d+)\)", str(error))  # of safetensors, whose errors are no OSError
    return int(told[1]) if told else None

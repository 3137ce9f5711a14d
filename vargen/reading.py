"""Untrusted files, opened without blocking: only regular files, and texts only up to a maximum size."""

from __future__ import annotations

import errno
import os
import stat
import sys
from io import BufferedReader
from pathlib import Path

from vargen.files import expand_user

STDIN = "-"  # stands for standard input in place of a file name


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading; a pipe would block, and a device has no end.

    Raises:
        OSError: it cannot be opened, or is not a regular file, also if reached through a link.
    """
    if stat.S_ISREG(os.stat(path).st_mode):  # checked first: merely opening a device can have effects
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        if stat.S_ISREG(os.fstat(file).st_mode):
            return os.fdopen(file, "rb")
        os.close(file)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_text(path: str | Path, name: str, most: int) -> str:
    """Read UTF-8 text from a regular file, or from standard input if `path` is `-`.

    Args:
        name: of the argument, for error messages. most: maximum size in bytes.

    Raises:
        ValueError: naming the argument, if it is not a regular file, is larger than `most` bytes, or is not UTF-8.
        FileNotFoundError, IsADirectoryError, PermissionError: likewise naming the argument.
    """
    if str(path) == STDIN:
        if sys.stdin is None:
            raise ValueError(f"{name} '-' is standard input, which is closed")
        what, data = f"{name} '-', standard input,", sys.stdin.buffer.read(most + 1)
    else:
        path = expand_user(path, name)
        what = f"{name} {str(path)!r}"
        try:
            with open_regular(path) as file:
                data = file.read(most + 1)
        except FileNotFoundError:
            raise FileNotFoundError(f"{what} does not exist") from None
        except (IsADirectoryError, PermissionError) as error:
            raise type(error)(f"{what} cannot be read: {error.strerror}") from None
        except OSError as error:
            raise ValueError(f"{what} cannot be read: {error.strerror or error}") from error
    if len(data) > most:
        raise ValueError(f"{what} must hold at most {most:,} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} must be UTF-8 text: {error}") from error

"""What every verb shares with the terminal: errors in one line, logs on stderr, tables and JSON on stdout.

Exit codes: 0 done, 1 failed, 2 wrong usage or bad input, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

# Errors of the operating system that a user's argument causes; a full disk, say, is a failure instead.
_WRONG_PATH = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)


class Commands(TyperGroup):
    """The root command: runs a verb and turns what it raises into a line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(130) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if hasattr(error, "exit_code"):  # typer's own usage errors, which it prints itself
                raise
            if os.environ.get("VARGEN_DEBUG", "") not in ("", "0"):
                traceback.print_exception(error, file=sys.stderr)
            say(f"error: {describe(error)}")
            raise typer.Exit(2 if is_bad_input(error) else 1) from None


class StandardOutput(io.TextIOWrapper):
    """What `print` writes to, whose errors tell that it was this that could not be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error


class OutputError(OSError):
    """Standard output cannot be written: a full disk, or a stream that was closed."""


def is_bad_input(error: Exception) -> bool:
    """Whether an error says that an argument is wrong: our own checks raised it, or a path cannot be used."""
    if isinstance(error, _WRONG_PATH):
        return True
    if not isinstance(error, ValueError | TypeError):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith(("vargen.", "recipes."))


def describe(error: Exception) -> str:
    """One printable line; a failure also gives its type and where to find the traceback."""
    text = " ".join(str(error).split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    if isinstance(error, OutputError):
        return f"standard output was not written: {error.strerror}"
    if is_bad_input(error) or (type(error) is ImportError and error.name is None):  # of ours: a package that is missing
        return text
    hint = "" if os.environ.get("VARGEN_DEBUG", "") not in ("", "0") else " (VARGEN_DEBUG=1 shows the traceback)"
    return f"{type(error).__name__}: {text}{hint}"


def say(line: str) -> None:
    """A line on stderr; characters that would command the terminal, as a file's name may hold them, are escaped."""
    print(printable(line), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text with control characters, line breaks excepted, written as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode() for c in text)


class Names:
    """Prints names of files as these are written. Where standard output takes no more, that is said once, and work goes on.

    Attributes:
        failed: whether a name was lost for another reason than that its reader has gone, which is no failure of ours.
    """

    def __init__(self, silent: bool = False):
        self.silent, self.failed = silent, False

    def add(self, path: Any) -> None:
        if self.silent:
            return
        try:
            print(printable(str(path)) if sys.stdout.isatty() else path, flush=True)
        except OSError as error:
            self.silent, gone = True, isinstance(error, BrokenPipeError)
            self.failed = not gone
            reason = "its reader has gone" if gone else error.strerror or str(error)
            say(f"standard output takes no more names of files ({reason}); the files are written all the same")
            with contextlib.suppress(OSError, ValueError):  # a stream without a file; else what is held back fails once more
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False), flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Aligned plain text. `align` holds `<` or `>` per column."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


class _Once(logging.Filter):
    """Drops a message that was shown before: a prompt that is drawn ten times gives one warning that it was cut short."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self.seen
        self.seen.add(message)
        return new


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


def verbosity() -> str:
    """`VARGEN_VERBOSITY`, or `warning`.

    Raises:
        ValueError: for an unknown level.
    """
    level = os.environ.get("VARGEN_VERBOSITY", "").strip().lower() or "warning"
    if level not in LEVELS:
        raise ValueError(f"VARGEN_VERBOSITY must be one of {', '.join(LEVELS)}, got {level!r}")
    return level


def configure_logging() -> None:
    """Send the library's log to stderr at the chosen level; other libraries' warnings only when that is verbose."""
    logger = logging.getLogger("vargen")
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, _Lines):  # of an earlier call in this process, on its stderr
            logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    handler.addFilter(_Once())
    logger.addHandler(handler)
    logger.setLevel(LEVELS[verbosity()])
    if not verbose():
        warnings.simplefilter("ignore")


def verbose() -> bool:
    return verbosity() in ("debug", "info")


def import_libraries() -> None:
    """Import what opens a model. No garbage is looked for meanwhile, and what is there then is never looked at again.

    Nearly all of it is diffusers' own: its base class for pipelines imports every network that it has.
    """
    gc.disable()
    try:
        import vargen.pipelines.registry  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def quiet_libraries() -> None:
    """Silence diffusers' and transformers' logs and loading bars, unless verbose. Imports both."""
    if verbose():
        return
    from vargen.compat import ensure_torchvision

    ensure_torchvision()
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()

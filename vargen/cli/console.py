"""Terminal handling shared by all commands: one-line errors and logs on stderr, tables and JSON on stdout.

Exit codes: 0 success, 1 failure, 2 wrong usage or bad input, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer
from tqdm import tqdm
from typer.core import TyperGroup

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

# Operating system errors caused by a user's argument; a full disk, for example, is a failure instead.
_WRONG_PATH = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_SILENCE = 60.0  # seconds after which a command without a terminal says how far it is


class Commands(TyperGroup):
    """The root command: runs a command and turns its exceptions into a line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            print_status("terminated" if isinstance(error, TerminatedError) else "interrupted")
            raise typer.Exit(143 if isinstance(error, TerminatedError) else 130) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if hasattr(error, "exit_code"):  # typer's own usage errors, which typer prints
                raise
            if os.environ.get("VARGEN_DEBUG", "") not in ("", "0"):
                traceback.print_exception(error, file=sys.stderr)
            print_status(f"error: {describe_error(error)}")
            raise typer.Exit(2 if is_bad_input(error) else 1) from None


class TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM; it ends as if it were interrupted, and nothing is left half-written."""


def raise_on_sigterm() -> None:
    """Let SIGTERM end a command as an interruption does, unless the process ignores it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not disturb the end
    raise TerminatedError


def is_bad_input(error: Exception) -> bool:
    """Whether an error means that an argument is wrong: one of our checks raised it, or a path cannot be used."""
    if isinstance(error, _WRONG_PATH):
        return True
    if not isinstance(error, ValueError | TypeError):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith("vargen.")


def describe_error(error: Exception) -> str:
    """Format an error as one printable line; failures include the type and how to get the traceback."""
    text = " ".join(str(error).split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    if is_bad_input(error) or (type(error) is ImportError and error.name is None):  # raised by us: a package is missing
        return text
    hint = "" if os.environ.get("VARGEN_DEBUG", "") not in ("", "0") else " (VARGEN_DEBUG=1 shows the traceback)"
    return f"{type(error).__name__}: {text}{hint}"


def print_status(line: str) -> None:
    """Print a line to stderr, with control characters (a file name may contain them) escaped."""
    print(printable(line), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Escape the control characters in a text, except line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode() for c in text)


def print_json(document: Any) -> None:
    """Print one JSON document to stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False), flush=True)


@contextlib.contextmanager
def progress_bar(what: str, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Show progress and the remaining time on stderr; where that is no terminal, one line a minute.

    Yields a function of the steps that are done and their total. Steps that are done at its first call do not count toward
    the speed.
    """
    shown: list[tqdm] = []
    said = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal said
        if not sys.stderr.isatty() and time.monotonic() > said + _SILENCE:
            said = time.monotonic()
            print_status(f"{what}: {done} of {total} {unit}".rstrip())
        if not shown:
            options: dict[str, Any] = {"disable": None, "leave": False, "dynamic_ncols": True, "file": sys.stderr}
            shown.append(tqdm(desc=what, unit=f" {unit}", total=total, initial=done, **options))
        shown[0].update(done - shown[0].n)

    try:
        yield show
    finally:
        for bar in shown:
            bar.close()


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Format aligned plain text. `align` holds `<` or `>` for each column."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


class _Once(logging.Filter):
    """Drops repeated messages: a prompt used for ten images gives one truncation warning."""

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
    """Return `VARGEN_VERBOSITY`, or `warning` by default."""
    level = os.environ.get("VARGEN_VERBOSITY", "").strip().lower() or "warning"
    if level not in LEVELS:
        raise ValueError(f"VARGEN_VERBOSITY must be one of {', '.join(LEVELS)}, got {level!r}")
    return level


def configure_logging() -> None:
    """Send the library's log to stderr at the chosen level, and show other libraries' warnings only at verbose levels."""
    logger = logging.getLogger("vargen")
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, _Lines):  # added by an earlier call in this process, with its stderr
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
    """Import everything needed to load a model, with garbage collection paused and the imported objects frozen afterwards.

    Most of the import time is diffusers': its base class for pipelines imports all of its networks.
    """
    gc.disable()
    try:
        import vargen.pipelines.loading  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def quiet_libraries() -> None:
    """Silence the logs and loading bars of diffusers and transformers, unless verbose. Imports both."""
    if verbose():
        return
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()

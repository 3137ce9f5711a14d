"""The terminal: results go to stdout; one line per error, progress and the log to stderr.

Exit codes: 0 success, 1 failure, 2 wrong usage or bad input, 130 interrupted or terminated.
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

from vargen.values import describe_invalid

LEVELS = ("debug", "info", "warning", "error")
# Operating system errors caused by a user's argument; a full disk, for example, is a failure instead.
_WRONG_PATH = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_SILENCE = 60.0  # seconds after which a command without a terminal says how far it is


class Commands(TyperGroup):
    """The root command: turns what a command raises into a line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print_status("interrupted")
            raise typer.Exit(130) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # typer prints the help
                raise
            if _shows_tracebacks():
                traceback.print_exception(error, file=sys.stderr)
            print_status(f"error: {describe_error(error)}")
            raise typer.Exit(2 if is_bad_input(error) else 1) from None


def raise_on_sigterm() -> None:
    """Let SIGTERM end a command as Ctrl-C does, unless the process ignores it."""

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not disturb the end
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, interrupt)


def is_bad_input(error: Exception) -> bool:
    """Whether an argument is wrong: typer or one of our checks raised the error, or a path cannot be used."""
    if isinstance(error, _WRONG_PATH) or hasattr(error, "format_message"):
        return True
    if not isinstance(error, ValueError | TypeError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("vargen.")


def describe_error(error: Any) -> str:
    """Format an error as one line; failures include the type and how to get the traceback."""
    text = error.format_message().rstrip(".") if hasattr(error, "format_message") else str(error)
    if hasattr(error, "param") and hasattr(error.__cause__, "errors"):  # typer's, of a value that pydantic refused
        text = f"{max(error.param.opts, key=len)} {describe_invalid(error.__cause__.errors()[0])}"
    text = " ".join(text.split())
    if getattr(error, "ctx", None) is not None:
        return f"{text}; see {error.ctx.command_path} --help"
    if is_bad_input(error) or (type(error) is ImportError and error.name is None):  # raised by us: a package is missing
        return text
    return f"{type(error).__name__}: {text}" + (" (VARGEN_DEBUG=1 shows the traceback)" if not _shows_tracebacks() else "")


def _shows_tracebacks() -> bool:
    return os.environ.get("VARGEN_DEBUG", "") not in ("", "0")


def print_status(line: str) -> None:
    """Print a line to stderr, with control characters (a file name may contain them) escaped."""
    print(printable(line), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Escape the control characters in a text, except line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode() for c in text)


def to_json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def print_json(document: Any) -> None:
    """Print one JSON document to stdout."""
    print(to_json(document), flush=True)


@contextlib.contextmanager
def progress_bar(what: str, unit: str = "", hidden: bool = False, silent: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show progress and the remaining time on stderr; where that is no terminal, one line a minute.

    Yields a function of the steps that are done and their total. Steps that are done at its first call do not count toward
    the speed.

    Args:
        hidden: without a bar, as the pipeline has its own. silent: without lines.
    """
    said, disabled = time.monotonic(), True if hidden else None  # None: where stderr is no terminal
    with tqdm(desc=what, unit=f" {unit}", disable=disabled, leave=False, dynamic_ncols=True, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            nonlocal said
            if not silent and not sys.stderr.isatty() and time.monotonic() > said + _SILENCE:
                said = time.monotonic()
                print_status(f"{what}: {done} of {total} {unit}".rstrip())
            if bar.total is None:
                bar.total, bar.n, bar.initial = total, done, done
            bar.update(done - bar.n)

        yield show


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Format aligned plain text. `align` holds `<` or `>` for each column."""
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ("  ".join(f"{row[i]:{side}{widths[i]}}" for i, side in enumerate(align)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


class _Log(logging.Handler):
    """Prints each message once: a prompt used for ten images gives one warning that it is too long."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.levelname.lower()}: {record.getMessage()}"
        if line not in self.seen:
            print_status(line)
        self.seen.add(line)


def verbosity() -> str:
    """Return `VARGEN_VERBOSITY`, or `warning` by default."""
    level = os.environ.get("VARGEN_VERBOSITY", "").strip().lower() or "warning"
    if level not in LEVELS:
        raise ValueError(f"VARGEN_VERBOSITY must be one of {', '.join(LEVELS)}, got {level!r}")
    return level


def configure_logging() -> None:
    """Send the library's log to stderr at the chosen level, and show other libraries' warnings only at verbose levels."""
    logger = logging.getLogger("vargen")
    logger.setLevel(verbosity().upper())
    logger.handlers = [each for each in logger.handlers if not isinstance(each, _Log)] + [_Log()]
    if verbosity() in ("warning", "error"):
        warnings.simplefilter("ignore")


def import_libraries() -> None:
    """Import what opens a model, and silence the logs and loading bars of diffusers and transformers, unless verbose.

    Garbage collection is paused meanwhile: diffusers' base class for pipelines imports all of its networks.
    """
    gc.disable()
    try:
        import vargen.pipelines.loading  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
    if verbosity() in ("warning", "error"):
        import diffusers.utils.logging as diffusers_logging
        import transformers.utils.logging as transformers_logging

        for library in (diffusers_logging, transformers_logging):
            library.set_verbosity_error()
            library.disable_progress_bar()

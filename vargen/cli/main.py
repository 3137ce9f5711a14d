"""The entry point. Each command imports its dependencies when it runs, so that `vargen --help` is fast."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer

from vargen import __version__
from vargen.cli import (
    bench,
    compare,
    convert,
    evaluate,
    generate,
    info,
    regenerate,
    score,
    serve,
    train,
    verify,
)
from vargen.cli.console import (
    Commands,
    StandardOutput,
    configure_logging,
    print_status,
    raise_on_sigterm,
)
from vargen.cli.results import describe_failed_write

app = typer.Typer(
    name="vargen",
    cls=Commands,
    help="Generate images and video faster with visual autoregressive models.",
    epilog="VARGEN_VERBOSITY=debug|info|warning|error sets the log level; VARGEN_DEBUG=1 shows tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text; rich would double the startup time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"vargen {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    configure_logging()


app.command("generate")(generate.generate)
app.command("regenerate")(regenerate.regenerate)
app.command("compare")(compare.compare)
app.command("verify")(verify.verify)
app.command("eval")(evaluate.evaluate)
app.command("score")(score.score)
app.command("serve")(serve.serve_model)
app.add_typer(info.app, name="info")
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.add_typer(convert.app, name="convert")


def main() -> None:
    """Run the command line in this process."""
    _open_closed_streams()
    raise_on_sigterm()
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")  # a file name may contain bytes that do not decode
    if isinstance(sys.stdout, io.TextIOWrapper):
        options: dict[str, Any] = {"encoding": sys.stdout.encoding, "line_buffering": sys.stdout.line_buffering}
        sys.stdout = StandardOutput(sys.stdout.detach(), errors="backslashreplace", **options)
    try:
        app(prog_name="vargen")
    except SystemExit as end:
        sys.exit(_flush_stdout(end.code))
    except OSError as error:  # from options that print, such as --version
        print_status(describe_failed_write("standard output", error))
        sys.exit(_flush_stdout(1))


def _open_closed_streams() -> None:
    """Replace closed standard streams, so that no other file gets their descriptors.

    Writing to standard output still fails, as it must, and the error is reported.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR if name == "stderr" else os.O_RDONLY)
            if name != "stdin":
                setattr(sys, name, os.fdopen(file, "w"))


def _flush_stdout(code: int | str | None) -> int | str | None:
    """Flush standard output and return the exit code: 1 if the output was lost. A full disk must not look like success."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not code:
            print_status(describe_failed_write("standard output", error))
        # Otherwise the buffered text would be written, and fail, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code

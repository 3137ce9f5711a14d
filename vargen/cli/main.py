"""The entry point. Each verb imports its dependencies when it runs, so that `vargen --help` is fast."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer

from vargen import __version__
from vargen.cli import bench, bench_kernels, bench_pictures, compare, convert, evaluate, generate, info, train, verify
from vargen.cli import bench_distribution as distribution
from vargen.cli.console import Commands, StandardOutput, configure_logging, say
from vargen.cli.outputs import not_written

app = typer.Typer(
    name="vargen",
    cls=Commands,
    help="Fast visual autoregressive image generation.",
    epilog="VARGEN_VERBOSITY=debug|info|warning|error sets the log level; VARGEN_DEBUG=1 shows tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text; rich would double the startup time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"vargen {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    configure_logging()


app.command("generate")(generate.generate)
app.command("compare")(compare.compare)
app.command("verify")(verify.verify)
app.command("eval")(evaluate.evaluate)
app.command("draw")(evaluate.draw)
app.command("score")(evaluate.score)
app.add_typer(info.app, name="info")
bench.app.command("distribution")(distribution.distribution)
bench.app.command("kernels")(bench_kernels.kernels)
bench.app.command("var")(bench_pictures.pictures)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.add_typer(convert.app, name="convert")


def main() -> None:
    """Run the command line in this process."""
    _open_closed()
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")  # a file name may contain bytes that do not decode
    if isinstance(sys.stdout, io.TextIOWrapper):
        told: dict[str, Any] = {"encoding": sys.stdout.encoding, "line_buffering": sys.stdout.line_buffering}
        sys.stdout = StandardOutput(sys.stdout.detach(), errors="backslashreplace", **told)
    try:
        app(prog_name="vargen")
    except SystemExit as end:
        sys.exit(_flushed(end.code))
    except OSError as error:  # from options that print, such as --version
        say(not_written("standard output", error))
        sys.exit(_flushed(1))


def _open_closed() -> None:
    """Replace closed standard streams, so that no other file gets their descriptors.

    Writing to standard output still fails, as it must, and the error is reported.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR if name == "stderr" else os.O_RDONLY)
            if name != "stdin":
                setattr(sys, name, os.fdopen(file, "w"))


def _flushed(code: int | str | None) -> int | str | None:
    """Flush standard output and return the exit code: 1 if the output was lost. A full disk must not look like success."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not code:
            say(not_written("standard output", error))
        # Otherwise the buffered text would be written, and fail, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code

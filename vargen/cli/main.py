"""The entry point. A verb imports what it needs when it runs, so that `vargen --help` is quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vargen import __version__
from vargen.cli import bench, compare, convert, generate, info, laws, train
from vargen.cli.console import Commands, configure_logging
from vargen.device import wait_passively

app = typer.Typer(
    name="vargen",
    cls=Commands,
    help="Fast visual autoregressive image generation.",
    epilog="VARGEN_VERBOSITY=debug|info|warning|error sets the log level; VARGEN_DEBUG=1 shows tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text; rich would also double the start-up time
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
app.add_typer(info.app, name="info")
bench.app.command("laws")(laws.laws)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.add_typer(convert.app, name="convert")


def main() -> None:
    """Run the command line of this process."""
    wait_passively()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a file name may hold bytes that are no text
    app(prog_name="vargen")

"""The entry point. Each command imports its dependencies when it runs, so that `vargen --help` is fast."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from vargen import __version__
from vargen.cli import bench, check, compare, convert, demo, evaluate, export, generate, info, serve, train, verify
from vargen.cli.common import Verb
from vargen.cli.console import Commands, configure_logging, raise_on_sigterm

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


app.command("generate", cls=Verb)(generate.generate)
app.command("regenerate", cls=Verb)(generate.regenerate)
app.command("compare", cls=Verb)(compare.compare)
app.command("verify", cls=Verb)(verify.verify)
app.command("check", cls=Verb)(check.check)
app.command("eval", cls=Verb)(evaluate.evaluate)
app.command("demo", cls=Verb)(demo.demo)
app.command("serve", cls=Verb)(serve.serve_model)
app.command("bench", cls=Verb)(bench.bench)
app.add_typer(info.app, name="info")
app.add_typer(train.app, name="train")
app.add_typer(convert.app, name="convert")
app.add_typer(export.app, name="export")


def main(*arguments: str) -> None:
    """Run the command line in this process, by default with the arguments of the process."""
    raise_on_sigterm()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name may contain bytes that do not decode
    app(list(arguments) or None, prog_name="vargen")

"""`vargen export`: methods for those who do not have vargen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vargen.cli.common import Verb
from vargen.cli.console import import_libraries, print_status

app = typer.Typer(no_args_is_help=True)


@app.callback()
def export() -> None:
    """Write methods to folders that other libraries run without vargen."""


@app.command("custom-generate", cls=Verb)
def export_custom_generate(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A new folder.")],
    accelerator: Annotated[
        str, typer.Option("--method", metavar="METHOD", help="gumbel, also with a window as in gumbel:window=8, or ar.")
    ] = "gumbel",
) -> None:
    """Write a folder for custom_generate of transformers: Janus, Emu3 and GLM-Image generate the same images faster."""
    import_libraries()
    from vargen.in_place.export import export_custom_generate

    folder = export_custom_generate(output, accelerator)
    print(folder, flush=True)
    print_status(f"next: model.generate(**inputs, custom_generate={str(folder)!r}, trust_remote_code=True); see its README.md")

"""`vargen demo`, and `python app.py`: the page in the browser."""

from __future__ import annotations

from typing import Annotated

import typer

from vargen.cli import common


def demo(
    model: common.ModelName = "emoji",
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", envvar="GRADIO_SERVER_NAME", help="Where to serve; 0.0.0.0 lets other machines in."),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="N", envvar="GRADIO_SERVER_PORT", help="Default: the first free one from 7860."),
    ] = None,
    scorer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Scores images; see --scorers of `vargen eval`. Default: emoji-scorer, or none."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=16, metavar="N", help="Jobs at a time over all visitors.")] = 1,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Generate images and video in the browser, and compare methods, until Ctrl-C."""
    from vargen.demo.launch import run_page

    run_page(model, host, port, device, scorer, concurrency, threads)

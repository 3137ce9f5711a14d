"""Buttons that write a file when they are pressed, and then download it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from vargen.demo.jobs import INSTANT_EVENT, user_errors


def connect_download(button: gr.Button, write: Callable[..., str | None], inputs: Any) -> None:
    """Have a button download the file that `write` returns the path of, called with the values of `inputs`; None for none."""
    file = gr.DownloadButton(visible="hidden", elem_id=f"{button.elem_id}-file")

    def write_file(*values: Any) -> str | None:
        with user_errors():
            return write(*values)

    written = button.click(write_file, inputs, file, **INSTANT_EVENT)
    written.success(None, file, None, js="(file) => { window.vargen.download(file); }", api_visibility="private")

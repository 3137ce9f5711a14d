"""The editor of the Live mode: a brush over the image, variations of a chosen strength, and images of the visitor's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from vargen.demo import rendering
from vargen.demo.image_service import ImageService
from vargen.pipelines.images import DEFAULT_VARIATION_STRENGTH

SCRIPT = Path(__file__).with_name("brush.js")


@dataclass(frozen=True)
class LiveEditor:
    """The editor.

    Attributes:
        stage: where jobs show their image.
        painting: stands for what brush.js sends with a job; empty for generation from the prompt alone. See `send_painting`.
        strength: of a variation.
        changes: events after which the image is generated again, each with what it calls in brush.js first.
        vary: the button of another variation, with another seed.
    """

    stage: gr.HTML
    painting: gr.Textbox
    strength: gr.Slider
    changes: tuple[tuple[Callable[..., Any], str], ...]
    vary: gr.Button


def build_live_editor(service: ImageService) -> LiveEditor:
    """Lay out the image with its brush, and what changes it beside or below it, if the model starts from an image."""
    side, (rows, columns) = service.pipe.image_size, service.pipe.grid
    painting = gr.Textbox(visible=False)
    with gr.Row(elem_id="live-columns"):
        with gr.Column(elem_id="live-board", min_width=240):
            empty = rendering.image_grid([None], "an empty frame") + rendering.share_buttons("")
            stage = gr.HTML(empty, elem_id="live-stage")
            gr.HTML(_canvas(side or 0, rows, columns), visible=side is not None, elem_id="live-easel")
        with gr.Column(visible=side is not None, elem_id="live-editor", min_width=240):
            gr.HTML(_brush_controls(), elem_id="live-brush")
            with gr.Row(elem_classes="vg-actions vg-while-painted"):
                keep = gr.Button("Keep this", size="sm", min_width=0, elem_id="live-keep")
                undo = gr.Button("Undo", size="sm", min_width=0, elem_id="live-undo")
            strength = gr.Slider(
                0.05, 1, DEFAULT_VARIATION_STRENGTH, step=0.05, label="How different", elem_id="live-strength",
                info="How far “More like this” goes: 1 keeps nothing of the image.",
            )  # fmt: skip
            with gr.Row(elem_classes="vg-actions"):
                vary = gr.Button("More like this", size="sm", min_width=0, elem_id="live-vary")
                own = gr.Button("Your own image", size="sm", min_width=0, elem_id="live-own")
                restart = gr.Button(
                    "Start over", size="sm", min_width=0, elem_id="live-restart", elem_classes="vg-while-edited"
                )
            gr.HTML('<input type="file" accept="image/*" hidden aria-label="Your own image">', elem_id="live-file")
    painted = gr.Button(visible="hidden", elem_id="live-painted")  # pressed by brush.js
    for button, call in ((keep, "keep"), (undo, "undo"), (own, "choose")):
        button.click(None, js=f"() => {{ window.vargen.brush.{call}(); }}", api_visibility="private")
    changes = ((painted.click, "read"), (strength.release, "vary"), (restart.click, "restart"))
    return LiveEditor(stage, painting, strength, changes, vary)


def call_first(call: str) -> str:
    """Return the script of an event that calls a function of brush.js before its inputs are sent."""
    return f"(...values) => {{ window.vargen.brush.{call}(); return values; }}"


def send_painting(place: int) -> str:
    """Return the script of an event that replaces one of its inputs by the painting."""
    return f"(...values) => {{ values[{place}] = window.vargen.brush.read(); return values; }}"


def connect_script(page: gr.Blocks) -> None:
    """Load the brush with the page."""
    page.load(None, js=SCRIPT.read_text("utf-8"), api_visibility="private")


def _canvas(side: int, rows: int, columns: int) -> str:
    return (
        f'<canvas data-side="{side}" data-rows="{rows}" data-columns="{columns}" role="img" '
        'aria-label="Paint here over the part of the image that is to be generated again"></canvas>'
    )


def _brush_controls() -> str:
    return (
        '<div class="vg-brush"><button type="button" aria-pressed="false">Brush</button>'
        '<label>Size <input type="range" min="0" max="2" step="0.5" value="0.5" aria-label="Size of the brush"></label></div>'
    )

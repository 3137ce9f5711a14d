"""The Edit mode, of a next-scale model: an image follows the typing, and parts that are painted over are generated again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image

from vargen.demo.calls import generate, new_file
from vargen.demo.inputs import Mode, Shared, Updates, Values, new_seed
from vargen.demo.links import make_link
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.images import DEFAULT_VARIATION_STRENGTH
from vargen.reading import on_white

CANVAS = 256  # pixels of the editor, which hangs in browsers where it is smaller than its canvas
_HEIGHT = 480
# A trigger, a function like `Mode.run`, and what it reads beside the inputs of all modes: editors send their images each time.
OwnEvent = tuple[Any, Callable[[Values], Iterator[Updates]], set[Any]]


@dataclass(frozen=True)
class Source:
    """What an image starts from: nothing, or an image with a mask (white: generated again) or a strength of variation."""

    image: Image.Image | None = None
    mask: Image.Image | None = None
    strength: float | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call."""
        found = {"image": self.image, "mask_image": self.mask, "strength": self.strength}
        return {name: value for name, value in found.items() if value is not None}


def read_painting(painted: dict[str, Any] | None, side: int) -> Source:
    """Return the image of the editor in the size of the model, with what was painted over as a mask, if anything was."""
    if not painted or painted["background"] is None:
        return Source()
    image = on_white(painted["background"]).resize((side, side), Image.Resampling.LANCZOS)
    layers = [np.asarray(each.resize((side, side)).convert("RGBA"))[..., 3] > 0 for each in painted["layers"]]
    mask = np.any(layers, axis=0) if layers else np.zeros((side, side), bool)
    return Source(image, Image.fromarray(mask.astype("uint8") * 255)) if mask.any() else Source(image)


def build_edit_tab(pipe: VisualPipeline, shared: Shared) -> tuple[Mode, list[OwnEvent]]:
    """Lay out the mode; returns it with the events of its own."""
    gr.Markdown("The image follows what you type. Paint on it, and only the painted part is generated again.")
    with gr.Row():
        with gr.Column(scale=5, min_width=280):
            note = gr.Markdown(elem_id="edit-note")
            stage = gr.Image(
                show_label=False, format="png", interactive=False, buttons=["fullscreen"], elem_id="edit-stage",
                placeholder="Type, and the image follows.",
            )  # fmt: skip
            with gr.Row():
                another = gr.Button("Another result", visible=False, elem_id="another")
                paint = gr.Button("Paint on it", elem_id="paint")
                save = gr.DownloadButton("Save image", elem_id="edit-save")
        with gr.Column(scale=5, min_width=280):
            editor = gr.ImageEditor(
                type="pil", show_label=False, sources=("upload", "clipboard"), height=_HEIGHT,
                transforms=(), layers=False, canvas_size=(CANVAS, CANVAS), format="png", elem_id="editor", buttons=[],
                brush=gr.Brush(default_size=45, colors=["#4f46e5b0"], color_mode="fixed"),
                placeholder="Press “Paint on it”, or drop an image of your own.",
            )  # fmt: skip
            strength = gr.Slider(
                0.05, 1, DEFAULT_VARIATION_STRENGTH, step=0.05, label="Or vary all of it: how different", elem_id="strength",
            )  # fmt: skip
    latest = gr.State(Source())
    side = pipe.image_size or pipe.grid[0] * 16

    def apply(values: Values, source: Source) -> Iterator[Updates]:
        prompt, seed = shared.read_prompt(values), int(values[shared.seed])
        for progress in generate(pipe, prompt, [seed], previews=False, **source.arguments()):
            if progress is None:
                yield {note: gr.skip()}
            else:
                finished = progress
        path = str(finished.result.save(new_file(f"vargen-{seed}.png")))
        what = "Painted part" if source.mask else "Variation" if source.image else f"**{prompt}**"
        updates: Updates = {
            stage: path, latest: source, save: gr.DownloadButton(value=path),
            another: gr.Button(visible=source.image is not None),
            note: f"{what}: {finished.seconds:.2f} s, {finished.passes} steps, seed {seed}.",
        }  # fmt: skip
        if source.image is None:
            updates[shared.link] = make_link("edit", prompt, seed, pipe.default_method, {}, {})
        yield updates

    def run(values: Values) -> Iterator[Updates]:
        yield from apply(values, Source())

    def typed(values: Values) -> Iterator[Updates]:
        """Follow the prompt: painted parts stay painted parts."""
        if values[shared.prompt].strip():
            yield from apply(values, values[latest])

    def painted(values: Values) -> Iterator[Updates]:
        source = read_painting(values[editor], side)
        if source.mask is not None:
            yield from apply({**values, shared.seed: new_seed()}, source)

    def varied(values: Values) -> Iterator[Updates]:
        source = read_painting(values[editor], side)
        if source.image is not None:
            yield from apply({**values, shared.seed: new_seed()}, replace(source, mask=None, strength=values[strength]))

    def again(values: Values) -> Iterator[Updates]:
        yield from apply({**values, shared.seed: new_seed()}, values[latest])

    def move(shown: Any) -> Any:
        """Put the image into the editor, larger: it is painted with the size of the screen."""
        if shown is None:
            return gr.skip()
        image = Image.fromarray(shown).resize((CANVAS, CANVAS), Image.Resampling.LANCZOS)
        return {"background": image, "layers": [], "composite": image}

    # The editor is shown from the start: given an image before it is drawn, it hangs in browsers.
    paint.click(move, stage, editor, show_progress="hidden", api_visibility="private")
    mode = Mode("New image", run, [latest], [stage, latest, note, save, another], note, on_open=typed)
    typing: list[OwnEvent] = [
        (shared.prompt.input, typed, set()),
        (shared.style.input, typed, set()),
        (another.click, again, set()),
    ]
    return mode, [*typing, (editor.input, painted, {editor}), (strength.release, varied, {editor, strength})]

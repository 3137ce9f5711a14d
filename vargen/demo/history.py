"""The images of this visit, newest first: shown again at a click, until the page is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vargen.demo.request import PageRequest

MAX_IMAGES_KEPT = 24  # of a visitor


@dataclass(frozen=True)
class PastImage:
    """One image of a visitor.

    Attributes:
        file: the PNG. request: that generates this image alone. passes: of its generation.
        seconds: of its generation, with the images beside it. score: empty without a scorer.
    """

    file: str
    request: PageRequest
    passes: int
    seconds: float
    score: str = ""


@dataclass(frozen=True)
class History:
    """The strip of a visitor's images, and the `PastImage` of each."""

    images: gr.State
    gallery: gr.Gallery

    @property
    def outputs(self) -> list[Any]:
        """What `add` returns updates of."""
        return [self.images, self.gallery]

    def add(self, held: Sequence[PastImage], images: Sequence[PastImage]) -> list[Any]:
        """Return the updates that put new images first; the oldest ones go."""
        kept = [*reversed(images), *held][:MAX_IMAGES_KEPT]
        return [kept, gr.Gallery([each.file for each in kept], selected_index=None)]


def build_history() -> History:
    """Lay out the strip, which the style sheet hides while it is empty."""
    with gr.Column(elem_id="history"):
        gallery = gr.Gallery(
            label="Images of this visit", show_label=True, columns=8, fit_columns=False, height="auto", format="png",
            interactive=False, allow_preview=False, object_fit="contain", buttons=[], elem_id="gallery",
        )  # fmt: skip
    return History(gr.State([]), gallery)

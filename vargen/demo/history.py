"""The images of this visit: shown again at a click, kept over a reload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from vargen.demo.visits import VisitStore


@dataclass(frozen=True)
class History:
    """The strip of a visitor's images.

    Attributes:
        visit: the id of the visit, which the browser keeps.
    """

    store: VisitStore
    visit: gr.BrowserState
    gallery: gr.Gallery

    @property
    def outputs(self) -> list[Any]:
        """What `update` returns updates of."""
        return [self.gallery]

    def update(self, visit: object) -> list[Any]:
        """Return the updates that show the images of a visit."""
        images = self.store.images(visit)
        return [gr.Gallery([each.file for each in images], selected_index=None)]


def build_history(store: VisitStore) -> History:
    """Lay out the strip, which the style sheet hides while it is empty."""
    visit = gr.BrowserState("", storage_key="vargen-visit")
    with gr.Column(elem_id="history"):
        gallery = gr.Gallery(
            label="Images of this visit", show_label=True, columns=8, fit_columns=False, height="auto", format="png",
            interactive=False, allow_preview=False, object_fit="contain", buttons=[], elem_id="gallery",
        )  # fmt: skip
    return History(store, visit, gallery)

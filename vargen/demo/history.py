"""The images of this visit: shown again at a click, kept over a reload, all in one ZIP file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from vargen.demo.downloads import connect_download
from vargen.demo.image_service import ImageService
from vargen.demo.visits import PastImage, VisitStore, zip_images


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
        return [gr.Gallery([(each.file, _caption(each)) for each in images], selected_index=None)]


def build_history(service: ImageService, store: VisitStore) -> History:
    """Lay out the strip, which the style sheet hides while it is empty."""
    visit = gr.BrowserState("", storage_key="vargen-visit")
    with gr.Column(elem_id="history"):
        gallery = gr.Gallery(
            label="Images of this visit", show_label=True, columns=8, fit_columns=False, height="auto", format="png",
            interactive=False, allow_preview=False, object_fit="contain", buttons=[], elem_id="gallery",
        )  # fmt: skip
        archive = gr.Button("Save all (ZIP)", size="sm", elem_id="zip")

    def write_archive(owner: object) -> str | None:
        files = [each.file for each in store.images(owner)]
        return str(service.folder.write("vargen.zip", zip_images(files))) if files else None

    connect_download(archive, write_archive, visit)
    return History(store, visit, gallery)


def _caption(image: PastImage) -> str:
    return "★" if image.starred else ""

"""The drop box: a PNG that is dropped on the page is generated again from its own parameters and compared."""

from __future__ import annotations

from typing import Any

import gradio as gr
from PIL import Image

from vargen.demo.generate_tab import ImageView
from vargen.demo.image_service import ImageService
from vargen.demo.inputs import Inputs, fill_inputs, filled_inputs
from vargen.demo.jobs import QUEUED_EVENT, user_errors
from vargen.demo.rendering import status_line, text
from vargen.demo.request import PageRequest, request_from_metadata
from vargen.image_metadata import read_parameters
from vargen.pipelines.regeneration import compare_images, validate_regenerable


def describe_mismatch(service: ImageService, method: str, model: object) -> str:
    """Explain in one sentence why an image's parameters give another image here; empty if they give the same."""
    if model not in (None, service.name):
        return f"The image is from the model {model}; this model generates another one."
    if method not in {each.name for each in service.available}:
        return f"The image is from the method {method}, which is not available here; another method may give another image."
    return ""


def build_drop_box(service: ImageService, inputs: Inputs, view: ImageView, queue_options: dict[str, Any]) -> None:
    """Lay out the drop box and connect it."""
    dropped = gr.File(
        label="Drop a shared PNG: it is generated again", file_types=[".png"],
        type="filepath", height=110, elem_id="drop",
    )  # fmt: skip
    verdict = gr.HTML(elem_id="verdict")

    def read_request(path: str) -> tuple[dict[str, Any], PageRequest]:
        parameters = read_parameters(path)
        return parameters, request_from_metadata(parameters, {**service.defaults, "method": service.available[0].name})

    def reload(path: str | None) -> dict[Any, Any]:
        if path is None:
            return {view.note: gr.skip()}
        with user_errors():
            parameters, found = read_request(path)
            validate_regenerable(parameters)
        if mismatch := describe_mismatch(service, found.method, parameters.get("model")):
            gr.Warning(text(mismatch))
        news = status_line(f"Parameters reloaded. {mismatch or 'Generating the image again …'}")
        return {**fill_inputs(inputs, found), view.note: news, verdict: news}

    def regenerate_dropped(path: str | None) -> list[Any]:
        if path is None:
            return [gr.skip(), gr.skip()]
        with user_errors():
            parameters, request = read_request(path)
            service.check(request)
            result = service.start(request, previews=False).result()
            with Image.open(path, formats=["PNG"]) as original:
                here = service.image_parameters(result, 0)
                found = compare_images(parameters, original, result.images[0], here)
        return [status_line(found.describe())] * 2

    reloaded = dropped.upload(reload, dropped, [*filled_inputs(inputs), view.note, verdict], **QUEUED_EVENT)
    reloaded.success(regenerate_dropped, dropped, [view.note, verdict], show_progress="hidden", **queue_options)

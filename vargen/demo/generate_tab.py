"""The Image mode: live previews, the token map, and what a visitor does with a finished image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from vargen.demo import rendering
from vargen.demo.history import History, PastImage
from vargen.demo.image_service import ImageService
from vargen.demo.inputs import Inputs, fill_inputs, filled_inputs, make_request
from vargen.demo.jobs import INSTANT_EVENT, POLL_SECONDS, Job, JobControls, JobRegistry, JobResult, Ticket, connect_job
from vargen.demo.links import link_to
from vargen.demo.request import PageRequest

_MORE_IMAGES = 4  # of "more like this"
_IDLE = "Press Enter, type another prompt, or click an example below."
_COPY = "() => { window.vargen.copyLink(document.querySelector('#copy-link'), window.vargen.linkOf('#stage')); }"


@dataclass(frozen=True)
class ImageView:
    """The components that show the images of one job, and what belongs to them: all of them change together.

    Attributes:
        stage: the images. details: how they were generated. same: says whether the baseline generates the same.
    """

    note: gr.HTML
    stage: gr.HTML
    details: gr.HTML
    download: gr.DownloadButton
    same: gr.HTML
    compare: gr.Button
    shown: gr.State

    @property
    def outputs(self) -> list[Any]:
        """What `show` and `clear` return updates of."""
        return [self.stage, self.details, self.download, self.shown, self.same, self.compare]

    def clear(self, service: ImageService) -> list[Any]:
        """Return the updates of a view whose image is not there yet."""
        stage = rendering.image_grid([None], "an empty frame")
        download = gr.DownloadButton(value=None, interactive=False)
        return [stage, _render_details([], service, 0, 0.0), download, [], gr.skip(), gr.skip()]

    def show(
        self, service: ImageService, images: Sequence[PastImage], request: PageRequest, details: str | None = None
    ) -> list[Any]:
        """Return the updates that show finished images, which `request` generates; `details` is HTML."""
        opened = [Path(each.file).read_bytes() for each in images]
        several = len(images) > 1
        captions = [_caption(each, several) for each in images]
        stage = rendering.image_grid(opened, request.prompt, captions, link_to(request, service.defaults))
        label = "Save the first image" if several else "Save image"
        download = gr.DownloadButton(label, value=images[0].file, interactive=True)
        slow_way = _describe_slow_way(service, request.method, len(images))
        return [stage, details or "", download, list(images), *slow_way]


def build_generate_tab(service: ImageService, shared: Inputs) -> ImageView:
    """Lay out the mode. Its events are connected by `connect_generate_tab`, when the strip of past images is there."""
    note = gr.HTML(rendering.status_line(_IDLE, "off"), elem_id="note")
    with gr.Row(elem_id="result"):
        with gr.Column(min_width=240, elem_id="result-image"):
            stage = gr.HTML(elem_id="stage")
            # The style sheet shows these with a finished image: gradio at times loses an update of what is visible.
            with gr.Row(elem_id="actions"):
                download = gr.DownloadButton("Save image", interactive=False, size="sm", elem_id="download", min_width=0)
                copy = gr.Button("Copy link to share", size="sm", elem_id="copy-link", min_width=0)
                with gr.Row(elem_id="same-row"):
                    same = gr.HTML(elem_id="same")
                    compare = gr.Button("Race the slow way", size="sm", elem_id="compare", min_width=0)
                more = gr.Button("More like this", size="sm", elem_id="more-like-this", min_width=0)
                reuse = gr.Button("Reuse settings", size="sm", elem_id="reuse", min_width=0)
        with gr.Column(min_width=240, elem_id="result-details"):
            details = gr.HTML(elem_id="details")
    view = ImageView(note, stage, details, download, same, compare, gr.State([], time_to_live=3600))
    copy.click(None, js=_COPY, api_visibility="private")

    def take_over(shown: list[PastImage]) -> dict[Any, Any]:
        return fill_inputs(shared, shown[0].request) if shown else {shared.subject.once: False}

    def take_next_seeds(shown: list[PastImage]) -> dict[Any, Any]:
        if not shown:
            return {shared.subject.once: False}
        following = {shared.subject.seed: shown[-1].request.seed + 1, shared.count: _MORE_IMAGES, shared.best: 1}
        return {**fill_inputs(shared, shown[-1].request), **following}

    reuse.click(take_over, view.shown, filled_inputs(shared), **INSTANT_EVENT)
    outputs = [*filled_inputs(shared), shared.count, shared.best]
    taken = more.click(take_next_seeds, view.shown, outputs, **INSTANT_EVENT)
    taken.success(
        None, None, None, js="() => { window.vargen.start('image'); window.vargen.showResult(); }", api_visibility="private"
    )
    return view


def connect_generate_tab(
    service: ImageService,
    registry: JobRegistry,
    shared: Inputs,
    view: ImageView,
    history: History,
    queue_options: dict[str, Any],
) -> None:
    """Connect the events that generate images and show those of the visit."""

    def read_request(values: Sequence[Any]) -> PageRequest:
        *own, method, num_images, best_of = values
        return make_request(service, own, method, num_images, best_of)

    def check(*values: Any) -> str:
        request = read_request(values)
        if warnings := service.prompt_warnings(request.prompt):
            gr.Warning(rendering.text(warnings))
        return link_to(request, service.defaults)

    def run(ticket: Ticket, *values: Any) -> Iterator[list[Any]]:
        *given, held = values
        request = read_request(given)
        job = service.start(request, stop=ticket.stop)
        kept = [gr.skip() for _ in history.outputs]
        rest = [gr.skip() for _ in view.outputs[2:]]
        yield [rendering.status_line(f"Generating “{request.prompt}” by {request.method} …"), *view.clear(service), *kept]
        while not job.done.wait(POLL_SECONDS):
            yield [gr.skip(), *_render_running(job, service), *rest, *kept]
        result = job.result()
        if result.stopped:
            stage = rendering.image_grid(job.preview or result.images, f"{request.prompt}, unfinished")
            details = _render_details(job.counts, service, job.tokens, result.seconds)
            yield [rendering.status_line(f"Stopped after {job.tokens} of {job.total} tokens."), stage, details, *rest, *kept]
            return
        past = past_images(service, result, len(job.counts))
        steps = describe_steps(len(job.counts), service.pipe.num_baseline_passes)
        news = f"Generated in {result.seconds:.1f} s: {steps}, seed {request.seed}."
        details = _render_details(job.counts, service, service.total, result.seconds, len(past))
        yield [rendering.status_line(news), *view.show(service, past, request, details), *history.add(held, past)]

    def show_again(listed: list[PastImage], selected: gr.SelectData) -> list[Any]:
        if not isinstance(selected.index, int) or not 0 <= selected.index < len(listed):
            return [gr.skip() for _ in [view.note, *view.outputs]]
        image = listed[selected.index]
        steps = describe_steps(image.passes, service.pipe.num_baseline_passes)
        news = f"From this visit: {image.seconds:.1f} s, {steps}, seed {image.request.seed}."
        return [rendering.status_line(news), *view.show(service, [image], image.request)]

    inputs = [*shared.sampling, shared.methods.choice, shared.count, shared.best]
    controls = JobControls(view.note, inputs, [*view.outputs, *history.outputs], [history.images])
    connect_job(registry, shared.subject, "image", controls, check, run, queue_options)
    again = history.gallery.select(show_again, history.images, [view.note, *view.outputs], **INSTANT_EVENT)
    again.success(None, None, None, js="() => { window.vargen.showResult(); }", api_visibility="private")


def past_images(service: ImageService, result: JobResult, passes: int) -> list[PastImage]:
    """Write the images of a finished job; returns what the visit keeps of them."""
    compared = result.request.num_images * result.request.best_of > 1  # a score alone says nothing
    return [
        PastImage(
            file, result.request.single(number, result.records[number]["seed"]), passes, result.seconds,
            rendering.score_caption(result.records[number]) if compared else "",
        )
        for number, file in enumerate(service.save(result))
    ]  # fmt: skip


def _describe_slow_way(service: ImageService, method: str, images: int) -> list[Any]:
    """Return a line if the baseline generates the same images, and the label of the button that compares them."""
    if service.repeats_baseline(method):
        why = f"{method} keeps the tokens that {service.baseline} samples; rounding decides between equally probable ones"
        same = f"Same image{'s' if images > 1 else ''} as the slow way, rounding errors aside."
        return [rendering.hint(same, why), "Race to check"]
    return ["", f"Race the {'fast' if method == service.baseline else 'slow'} way"]


def describe_steps(steps: int, baseline: int) -> str:
    """Return the passes of an image, beside those of the baseline if that takes more: "45 steps instead of 256"."""
    return f"{steps} step{'s' if steps != 1 else ''}{f' instead of {baseline}' if steps < baseline else ''}"


def _caption(image: PastImage, several: bool) -> str:
    """Return what an image of several, or the best of several candidates, needs beside the status line."""
    own = [f"seed {image.request.seed}"] if several else []
    return ", ".join([*own, image.score] if image.score else own)


def _render_running(job: Job, service: ImageService) -> list[str]:
    images: list[Any] = [*job.preview] or [None] * (job.request.num_images * job.request.best_of)
    details = _render_details(list(job.counts), service, job.tokens, job.seconds, len(images))
    return [rendering.image_grid(images, f"{job.request.prompt}, unfinished"), details]


def _render_details(counts: Sequence[int], service: ImageService, done: int, seconds: float, images: int = 1) -> str:
    whose = " of the slowest image" if images > 1 else ""
    return (
        f"<h3>Each bar is one step{whose}; longer bars fill in more of the image.</h3>"
        f"{rendering.token_map(counts, service.grids)}"
        f"{rendering.progress(done, service.total, seconds)}"
        f"{rendering.numbers(rendering.speed(seconds, done, counts, images))}"
    )

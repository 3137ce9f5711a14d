"""The Generate tab: one method, live previews, the token map, and the images of this session."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from vargen.demo import rendering
from vargen.demo.image_service import ImageService
from vargen.demo.inputs import Inputs, MethodList, build_method_list, make_request
from vargen.demo.jobs import INSTANT_EVENT, POLL_SECONDS, START, Job, JobControls, JobRegistry, Ticket, connect_job
from vargen.demo.request import MAX_CANDIDATES, MAX_IMAGES, PageRequest
from vargen.scoring.registry import DEFAULT_SCORER

_MAX_GALLERY = 24  # images in a session's gallery
_IDLE = "Press Generate, or Enter in the prompt."


def build_generate_tab(
    service: ImageService, registry: JobRegistry, shared: Inputs, queue_options: dict[str, Any]
) -> tuple[MethodList, gr.HTML]:
    """Lay out the tab and connect its events.

    Returns:
        The list of methods, and the status line; the drop box fills both.
    """
    with gr.Row(elem_id="go-row"):
        count = gr.Dropdown(
            [(f"{n} image{'s' if n > 1 else ''}", n) for n in range(1, MAX_IMAGES + 1)],
            value=1, show_label=False, label="Images", container=False, min_width=130, scale=1, elem_id="count",
        )  # fmt: skip
        best = gr.Dropdown(
            [(f"best of {n}", n) for n in (1, 2, 4, MAX_CANDIDATES)],
            value=1, show_label=False, label="Candidates", container=False, min_width=130, scale=1, elem_id="best",
            visible=service.scorer is not None,
        )  # fmt: skip
        start = gr.Button("Generate", variant="primary", min_width=130, scale=3, elem_id="generate", elem_classes=START)
        stop = gr.Button("Stop", variant="stop", interactive=False, min_width=80, scale=1, elem_id="stop")
    note = gr.HTML(rendering.status_line(_IDLE, "off"), elem_id="note")
    stage = gr.HTML(_render([None], [], service, 0, 0.0, "an empty frame"), elem_id="stage")
    download = gr.DownloadButton("Download PNG", interactive=False, size="md", elem_id="download")
    methods = build_method_list(
        gr.Radio, service.available, lambda each: f"{each.name} · {each.kind} · {each.summary}", "more-methods",
        value=service.default_method, label="Method", elem_id="method", elem_classes="methods",
    )  # fmt: skip
    unavailable = [
        f"{each.name} ({each.unsupported_reason.split(': ')[0]})"
        for each in service.methods.values()
        if each.unsupported_reason is not None
    ]
    if unavailable:
        with gr.Accordion("Methods that this model cannot run", open=False):
            gr.HTML(rendering.hint(f"{'; '.join(unavailable)}."), padding=True)
    with gr.Accordion("Command line for the same images", open=False):
        command = gr.Code(language="shell", interactive=False, show_label=False, wrap_lines=True, elem_id="command")
    gallery = gr.Gallery(
        label="Images of this session", columns=6, fit_columns=False, height="auto", format="png", interactive=False,
        object_fit="contain", buttons=["download", "fullscreen"], elem_id="gallery", visible=False,
    )  # fmt: skip
    files = gr.State([], time_to_live=3600)

    def check(*values: Any) -> PageRequest:
        *own, method, num_images, best_of = values
        request = make_request(service, own, method, num_images, best_of)
        if warnings := service.prompt_warnings(request.prompt):
            gr.Warning(rendering.text(warnings))
        return request

    def run(ticket: Ticket, *values: Any) -> Iterator[list[Any]]:
        *own, method, num_images, best_of, earlier = values
        request = make_request(service, own, method, num_images, best_of)
        job = service.start(request, stop=ticket.stop)
        yield [rendering.status_line(f"Generating “{request.prompt}” by {method} …"), *[gr.skip()] * 5]
        while not job.done.wait(POLL_SECONDS):
            yield [gr.skip(), _render_running(job, service), *[gr.skip()] * 4]
        result = job.result()
        if result.stopped:
            alt, images = f"{request.prompt}, unfinished", job.preview or result.images
            view = _render(images, job.counts, service, job.tokens, result.seconds, alt)
            yield [rendering.status_line(f"Stopped after {job.tokens} of {job.total} tokens."), view, *[gr.skip()] * 4]
            return
        new = service.save(result)
        kept = [*reversed(new), *earlier][:_MAX_GALLERY]
        captions = [rendering.score_caption(record) for record in result.records] if service.scorer else []
        news = f"Generated in {result.seconds:.1f} seconds and {result.stats.passes} passes, seed {request.seed}."
        yield [
            rendering.status_line(news),
            _render(result.images, job.counts, service, job.total, result.seconds, request.prompt, captions),
            gr.Gallery(kept, visible=True, selected_index=None),
            gr.DownloadButton(value=new[0], interactive=True),
            command_line(service, request),
            kept,
        ]

    def select(listed: list[str], selected: gr.SelectData) -> Any:
        return gr.DownloadButton(value=listed[selected.index]) if selected.index < len(listed) else gr.skip()

    outputs = [stage, gallery, download, command, files]
    controls = JobControls(start, stop, note, [methods.choice, count, best], outputs, [files])
    connect_job(registry, shared, controls, check, run, queue_options)
    gallery.select(select, files, download, **INSTANT_EVENT)
    return methods, note


def _render_running(job: Job, service: ImageService) -> str:
    images: list[Any] = [*job.preview] or [None] * (job.request.num_images * job.request.best_of)
    return _render(images, list(job.counts), service, job.tokens, job.seconds, f"{job.request.prompt}, unfinished")


def _render(
    images: Any, counts: list[int], service: ImageService, done: int, seconds: float, alt: str, captions: Sequence[str] = ()
) -> str:
    slowest = " of the slowest image" if len(images) > 1 else ""
    return (
        f'<div class="vg-duo"><div><h3>Image</h3>{rendering.image_grid(images, alt, captions)}</div>'
        f"<div><h3>Token map{slowest}</h3>{rendering.token_map(counts, service.grids)}{rendering.legend()}"
        f"{rendering.progress(done, service.total)}"
        f"{rendering.numbers(rendering.speed(seconds, done, counts, len(images)))}</div></div>"
    )


def command_line(service: ImageService, request: PageRequest) -> str:
    """Return the command that generates the same images."""
    prompt = ["--class-label", request.prompt] if service.by_class else [request.prompt]
    parts = ["vargen", "generate", *prompt, "--seed", str(request.seed), "--accelerator", request.method]
    parts += ["--guidance-scale", f"{request.guidance_scale:g}", "--temperature", f"{request.temperature:g}"]
    parts += ["--top-k", str(request.top_k or service.vocab), "--top-p", f"{request.top_p:g}"]
    parts += ["--negative-prompt", request.negative_prompt] if request.negative_prompt else []
    parts += ["-n", str(request.num_images)] if request.num_images > 1 else []
    if request.best_of > 1:
        parts += ["--best-of", str(request.best_of)]
        parts += ["--scorer", service.scorer_name] if service.scorer_name != DEFAULT_SCORER else []
    parts += ["--model", service.name] if service.name != "emoji" else []
    return shlex.join(parts)

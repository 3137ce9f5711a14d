"""The Live tab: generates during typing and shows each scale, for models that need only a few passes per image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from vargen.demo import rendering
from vargen.demo.image_service import ImageService
from vargen.demo.inputs import Subject, with_style
from vargen.demo.jobs import INSTANT_EVENT, PUSH_LINK, JobRegistry, Ticket, stream_job
from vargen.demo.links import link_to
from vargen.demo.live_editor import build_live_editor, call_first, send_painting
from vargen.demo.method_lists import build_method_list
from vargen.demo.request import PageRequest, new_seed
from vargen.demo.sources import ImageSource, read_painting
from vargen.image_metadata import png_file

_PAUSE = 0.15  # seconds without a keystroke before generation starts
_FILE = "vargen-live.png"
_POLL_SECONDS = 0.03  # how often to look for a new preview


def build_live_tab(
    service: ImageService,
    registry: JobRegistry,
    shared: Subject,
    tabs: tuple[Sequence[gr.Tab], gr.Tab],
    queue_options: dict[str, Any],
) -> None:
    """Lay out the tab and connect its events.

    Args:
        service: of a model that needs only a few passes; it may be another one than that of the Image mode.
        tabs: the other tabs, and this one; typing while another tab is open does not start a job.
    """
    note = gr.HTML(rendering.status_line("", "off"), elem_id="live-note")
    editor = build_live_editor(service)
    with gr.Accordion(f"Method of the model {service.name}", open=False):
        methods = build_method_list(
            gr.Radio, service.available, service.default_method, "Method", elem_id="live-method",
            elem_classes="methods",
        )  # fmt: skip
    another_seed = shared.buttons["live"].start
    link = gr.Textbox(visible=False)
    ticket, is_open = gr.Textbox(visible=False), gr.State(False)
    others, own_tab = tabs
    own_tab.select(lambda: True, None, is_open, **INSTANT_EVENT)
    for tab in others:
        tab.select(lambda: False, None, is_open, **INSTANT_EVENT)

    def start_on_input(request: gr.Request, opened: bool, prompt: str) -> str:
        """Return a ticket and stop the job of the previous one; no ticket if there is nothing to generate."""
        session = request.session_hash or ""
        registry.stop_visitor_jobs(session, "live")
        return registry.enqueue(session, "live") if opened and prompt.strip() else ""

    def start_on_open(request: gr.Request, prompt: str) -> str:
        return start_on_input(request, True, prompt)

    def run(ticket: Ticket, *values: Any) -> Iterator[list[Any]]:
        prompt, style, seed, method, painting, strength = values
        if ticket.stop.wait(_PAUSE):
            return
        source = read_painting(painting, strength, service.pipe.image_size, service.pipe.grid)
        request = PageRequest(with_style(prompt, style, service.styles), method, seed, **service.defaults, source=source)
        service.check(request)
        job = service.start(request, stop=ticket.stop, every_pass=True)
        shown: list[bytes] = []
        while not job.done.wait(_POLL_SECONDS):
            if job.preview is not shown and not ticket.stop.is_set():
                shown = job.preview
                preview = rendering.image_grid([*shown], f"{request.prompt}, unfinished")
                yield [gr.skip(), preview + rendering.share_buttons(""), gr.skip()]
        result = job.result()
        if not result.stopped:
            news = f"{_describe(source)} in {result.seconds:.2f} s, {result.stats.passes} steps, seed {request.seed}."
            image = png_file(result.images[0], service.image_parameters(result, 0))
            address = "" if source else link_to(request, service.defaults, "live")  # no link can hold an image
            shown_at_last = rendering.image_grid([image], request.prompt) + rendering.share_buttons(address, name=_FILE)
            yield [rendering.status_line(news), shown_at_last, address]

    def run_job(number: str, *values: Any) -> Iterator[list[Any]]:
        yield from stream_job(registry, number, lambda each: run(each, *values))

    reseeded = another_seed.click(new_seed, None, shared.seed, **INSTANT_EVENT)
    varied = editor.vary.click(new_seed, None, shared.seed, js=call_first("vary"), **INSTANT_EVENT)
    typed = (reseeded.then, varied.then, shared.prompt.input, shared.style.input, methods.choice.input)
    opened = [is_open, shared.prompt]
    started = [event(start_on_input, opened, ticket, **INSTANT_EVENT) for event in typed]
    for event, call in editor.changes:
        started.append(event(start_on_input, opened, ticket, js=call_first(call), **INSTANT_EVENT))
    started.append(own_tab.select(start_on_open, shared.prompt, ticket, **INSTANT_EVENT))
    for each in started:
        values = [ticket, shared.prompt, shared.style, shared.seed, methods.choice, editor.painting, editor.strength]
        paint = send_painting(values.index(editor.painting))
        done = each.then(
            run_job, values, [note, editor.stage, link], js=paint, show_progress="hidden", **queue_options
        )  # fmt: skip
        done.success(None, link, None, js=PUSH_LINK.replace("push", "replace"), api_visibility="private")


def _describe(source: ImageSource | None) -> str:
    if source is None:
        return "Generated"
    return f"Variation of strength {source.strength:g}" if source.mask is None else "Painted part generated again"

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
from vargen.demo.method_lists import build_method_list
from vargen.demo.request import PageRequest, new_seed

_PAUSE = 0.15  # seconds without a keystroke before generation starts
_POLL_SECONDS = 0.03  # how often to look for a new preview
_IDLE = "Type a prompt: the image is generated while you type, with the same seed."


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
    note = gr.HTML(rendering.status_line(_IDLE, "off"), elem_id="live-note")
    stage = gr.HTML(rendering.image_grid([None], "an empty frame"), elem_id="live-stage")
    methods = build_method_list(
        gr.Radio, service.available, service.default_method, "more-live-methods", f"Method of the model {service.name}",
        elem_id="live-method", elem_classes="methods",
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
        prompt, style, seed, method = values
        if ticket.stop.wait(_PAUSE):
            return
        request = PageRequest(with_style(prompt, style), method, seed, **service.defaults)
        service.check(request)
        job = service.start(request, stop=ticket.stop, every_pass=True)
        shown: list[bytes] = []
        while not job.done.wait(_POLL_SECONDS):
            if job.preview is not shown and not ticket.stop.is_set():
                shown = job.preview
                yield [gr.skip(), rendering.image_grid([*shown], f"{request.prompt}, unfinished"), gr.skip()]
        result = job.result()
        if not result.stopped:
            news = f"Generated in {result.seconds:.2f} seconds and {result.stats.passes} passes, seed {request.seed}."
            stage_now = rendering.image_grid([*result.images], request.prompt)
            yield [rendering.status_line(news), stage_now, link_to(request, service.defaults, "live")]

    def run_job(number: str, *values: Any) -> Iterator[list[Any]]:
        yield from stream_job(registry, number, lambda each: run(each, *values))

    reseeded = another_seed.click(new_seed, None, shared.seed, **INSTANT_EVENT)
    events = (reseeded.then, shared.prompt.input, shared.style.input, methods.choice.input)
    started = [event(start_on_input, [is_open, shared.prompt], ticket, **INSTANT_EVENT) for event in events]
    started.append(own_tab.select(start_on_open, shared.prompt, ticket, **INSTANT_EVENT))
    for each in started:
        values = [ticket, shared.prompt, shared.style, shared.seed, methods.choice]
        done = each.then(run_job, values, [note, stage, link], show_progress="hidden", **queue_options)
        done.success(None, link, None, js=PUSH_LINK.replace("push", "replace"), api_visibility="private")

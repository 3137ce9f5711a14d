"""The page: prompt and buttons on top, one tab per mode, and below them the wall. Also the page of a video model alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gradio as gr

from vargen.demo import first_sight
from vargen.demo.api import add_api_endpoints
from vargen.demo.drop_box import build_drop_box
from vargen.demo.generate_tab import build_generate_tab, connect_generate_tab
from vargen.demo.history import build_history
from vargen.demo.image_service import ImageService
from vargen.demo.inputs import (
    ANY_STYLE,
    Inputs,
    Subject,
    build_inputs,
    build_seed,
    build_top,
    fill_inputs,
    fill_subject,
    filled_inputs,
)
from vargen.demo.jobs import QUEUED_EVENT, JobRegistry
from vargen.demo.links import request_of_link
from vargen.demo.live_editor import connect_script
from vargen.demo.live_tab import build_live_tab
from vargen.demo.look import SCRIPT, TITLE
from vargen.demo.malformed_requests import Page
from vargen.demo.method_lists import MethodList
from vargen.demo.modes import MODES, mode_tab
from vargen.demo.race_tab import build_race_tab, connect_comparison
from vargen.demo.rendering import text
from vargen.demo.video_service import VideoService
from vargen.demo.video_tab import EXAMPLE, build_video_tab

_MAX_QUEUE = 32
_START_LINKED = "(mode) => { if (mode) window.vargen.startLinked(mode); }"


def build_page(
    service: ImageService,
    concurrency: int = 1,
    video: VideoService | None = None,
    live: ImageService | None = None,
    opening: bool = False,
) -> gr.Blocks:
    """Build the page of a loaded image model.

    Args:
        concurrency: maximum number of concurrent jobs over all visitors; the others wait in one queue.
        video: a video model, which gets a mode.
        live: a model that generates while the visitor types; by default the image model itself, if it is fast enough.
        opening: whether to open on the recorded race and the wall, whose seeds are those of the packaged models.
    """
    registry, queue_options = JobRegistry(), _queue_options(concurrency)
    private = {**queue_options, "api_visibility": "private"}
    live = live or (service if service.live else None)
    modes = ["image"]
    modes += ["live"] if live is not None else []
    modes += ["video"] if video is not None else []
    modes += ["race"]
    with _page(_describe_model(service, opening), registry, concurrency) as page:
        shared = build_inputs(service, modes)
        tabs: dict[str, gr.Tab] = {}
        with gr.Tabs(elem_id="modes"):
            with mode_tab("image") as tabs["image"]:
                view = build_generate_tab(service, shared)
                if opening:
                    gr.HTML(first_sight.render_race(), elem_id="race-replay")
            if live is not None:
                with mode_tab("live") as tabs["live"]:
                    pass
            if video is not None:
                with mode_tab("video") as tabs["video"]:
                    build_video_tab(video, registry, shared.subject, private)
            with mode_tab("race") as tabs["race"]:
                racers = build_race_tab(service, registry, shared, private)
                connect_comparison(service, view.compare, view.shown, shared, racers)
        if live is not None:
            others = [tab for name, tab in tabs.items() if name != "live"]
            with tabs["live"]:
                build_live_tab(live, registry, shared.subject, (others, tabs["live"]), private)
            connect_script(page)
        history = build_history()
        connect_generate_tab(service, registry, shared, view, history, private)
        if opening:
            _build_wall(tuple(modes), shared.subject)
        build_drop_box(service, shared, view, private)
        _connect_link(page, service, shared, modes, racers)
        add_api_endpoints(service, queue_options)
    return page


def build_video_page(service: VideoService, concurrency: int = 1) -> gr.Blocks:
    """Build the page of a video model alone; see `build_page`."""
    registry = JobRegistry()
    with _page(f"<b>{text(service.name)}</b>", registry, concurrency) as page:
        top = build_top(["video"], example=EXAMPLE)
        with gr.Accordion("Seed", open=False, elem_id="advanced"):
            subject = Subject(*top, *build_seed())
        with gr.Tabs(elem_id="modes"), mode_tab("video"):
            build_video_tab(service, registry, subject, {**_queue_options(concurrency), "api_visibility": "private"})
        page.load(None, js="() => { window.vargen.open('video'); }", api_visibility="private")
        _submit_prompt(subject)
    return page


def _describe_model(service: ImageService, packaged: bool) -> str:
    """Return the name of a model, and what the packaged ones know, as HTML."""
    return f"<b>{text(service.name)}</b>{' (small images of single objects)' if packaged else ''}"


def _queue_options(concurrency: int) -> dict[str, Any]:
    return {"concurrency_id": "generate", "concurrency_limit": concurrency}


def _submit_prompt(subject: Subject) -> None:
    """Have Enter in the prompt press the start button of the open mode: the other buttons are not laid out."""
    subject.prompt.submit(None, js="() => { window.vargen.pressOpen(); }", api_visibility="private")


def _build_wall(modes: tuple[str, ...], subject: Subject) -> None:
    gr.HTML(first_sight.render_wall(modes), elem_id="wall")
    choose = gr.Button(visible="hidden", elem_id="choose")
    outputs = [*subject.values, subject.once]
    choose.click(None, None, outputs, js="() => window.vargen.takeChosen()", api_visibility="private")


def _connect_link(page: gr.Blocks, service: ImageService, shared: Inputs, modes: Sequence[str], racers: MethodList) -> None:
    """Have a loaded page generate what its address says."""
    mode = gr.Textbox(visible=False)
    arrived = gr.HTML(elem_id="linked")  # page.js waits for it: the other values are there, too, then

    def read_link(request: gr.Request) -> dict[Any, Any]:
        query = dict(request.query_params)
        wanted = query.get("mode", "image")
        methods = query.pop("method", service.default_method).split(",")
        try:
            if wanted not in modes:
                raise ValueError(f"This page has no mode {wanted!r}; it has {', '.join(modes)}.")
            found = request_of_link({**query, "method": methods[0]}, service.defaults)
            if found is not None and wanted == "image":
                service.check(found)
        except ValueError as error:
            gr.Warning(text(error))
            found = None
        if found is None:
            return {mode: "", arrived: ""}
        filled = fill_inputs(shared, found) if wanted == "image" else fill_subject(shared.subject, found)
        if wanted == "video":  # has no chips of styles
            filled |= {shared.subject.prompt: found.prompt, shared.subject.style: ANY_STYLE}
        filled |= racers.select(*methods) if wanted == "race" and len(methods) > 1 else {}
        return {**filled, mode: wanted, arrived: "<i></i>"}

    outputs = [mode, arrived, *filled_inputs(shared), racers.choice]
    loaded = page.load(read_link, None, outputs, **QUEUED_EVENT)
    loaded.success(None, mode, None, js=_START_LINKED, api_visibility="private")
    _submit_prompt(shared.subject)


@contextmanager
def _page(model: str, registry: JobRegistry, concurrency: int) -> Iterator[gr.Blocks]:
    """Open a page with its header; jobs of a visitor who closes it are stopped. `model` is HTML."""
    with Page(title=TITLE, analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        summaries = text(json.dumps({name: mode.summary for name, mode in MODES.items()}))  # page.js shows them over the tabs
        gr.HTML(
            f'<div class="vg-head" data-modes="{summaries}"><h1>vargen</h1>'
            f"<p>Fast image and video generation. Model: {model}</p></div>"
        )
        theme = gr.Button("Light / dark", size="sm", elem_id="theme")
        theme.click(None, js="() => { window.vargen.toggleTheme(); }", api_visibility="private")
        page.load(None, js=SCRIPT.read_text("utf-8"), api_visibility="private")
        yield page

        def stop_visitor_jobs(request: gr.Request) -> None:
            registry.stop_visitor_jobs(request.session_hash or "")

        page.unload(stop_visitor_jobs)
    # After each request, gradio rebuilds a table of all requests for a dashboard that is not served here.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", str(2**31))
    page.queue(max_size=_MAX_QUEUE, default_concurrency_limit=concurrency)

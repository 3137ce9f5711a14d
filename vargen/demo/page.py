"""The page: header, inputs and tabs, its look, and the page of a video model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr

from vargen.demo.api import add_api_endpoints
from vargen.demo.explore_tab import build_explore_tab
from vargen.demo.generate_tab import build_generate_tab
from vargen.demo.image_service import ImageService
from vargen.demo.inputs import build_inputs, reload_on_drop
from vargen.demo.jobs import START, JobRegistry
from vargen.demo.live_tab import build_live_tab
from vargen.demo.malformed_requests import Page
from vargen.demo.race_tab import build_race_tab
from vargen.demo.rendering import text
from vargen.demo.video_service import VideoService
from vargen.demo.video_tab import build_video_controls, build_video_tab, connect_events, output_components

CSS = Path(__file__).with_name("style.css")
FAVICON = Path(__file__).with_name("favicon.svg")
_MAX_QUEUE = 32
_TOGGLE_DARK = "() => { document.body.classList.toggle('dark'); }"
# Enter in the prompt presses the button of the open tab: the buttons of the other tabs are not laid out.
_PRESS_OPEN = f"() => {{ [...document.querySelectorAll('.{START}')].find(each => each.offsetParent)?.click(); }}"


def build_page(service: ImageService, concurrency: int = 1, video: VideoService | None = None) -> gr.Blocks:
    """Build the page of a loaded image model.

    Args:
        concurrency: maximum number of concurrent jobs over all visitors; the others wait in one queue.
        video: a video model, which gets its own tab.
    """
    registry, queue_options = JobRegistry(), _queue_options(concurrency)
    private = {**queue_options, "api_visibility": "private"}
    intro = "Images are generated token by token. See how methods that need fewer passes of the network speed this up."
    with _page(intro, service.name, registry, concurrency) as page:
        with gr.Row():
            with gr.Column(scale=4, min_width=300):
                shared = build_inputs(service)
            with gr.Column(scale=7, min_width=320), gr.Tabs():
                with gr.Tab("Generate") as generate:
                    methods, note = build_generate_tab(service, registry, shared, private)
                with gr.Tab("Race") as race:
                    build_race_tab(service, registry, shared, private)
                tabs = [generate, race]
                if service.relaxes:
                    with gr.Tab("Explore") as explore:
                        build_explore_tab(service, registry, shared, private)
                    tabs.append(explore)
                if video is not None:
                    with gr.Tab("Video") as moving:
                        build_video_tab(video, registry, shared, private)
                    tabs.append(moving)
                if service.live:
                    with gr.Tab("Live") as live:
                        build_live_tab(service, registry, shared, (tabs, live), private)
        shared.prompt.submit(None, js=_PRESS_OPEN, api_visibility="private")
        reload_on_drop(service, shared, methods, note)
        add_api_endpoints(service, queue_options)
    return page


def build_video_page(service: VideoService, concurrency: int = 1) -> gr.Blocks:
    """Build the page of a video model; see `build_page`."""
    registry = JobRegistry()
    intro = (
        "A video is generated block by block: a small network drafts each block, a scorer scores it, and the large network "
        "regenerates blocks that score too low."
    )
    with _page(intro, service.name, registry, concurrency) as page:
        with gr.Row():
            with gr.Column(scale=4, min_width=300):
                prompt = gr.Textbox("waving hand", label="Prompt", elem_id="prompt", max_length=500)
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1, elem_id="seed")
                controls = build_video_controls(service)
            with gr.Column(scale=7, min_width=320):
                outputs = output_components()
        private = {**_queue_options(concurrency), "api_visibility": "private"}
        start_on = connect_events(service, registry, (prompt, seed, None), controls, outputs, private)
        start_on(prompt.submit)
    return page


def _queue_options(concurrency: int) -> dict[str, Any]:
    return {"concurrency_id": "generate", "concurrency_limit": concurrency}


@contextmanager
def _page(intro: str, model: str, registry: JobRegistry, concurrency: int) -> Iterator[gr.Blocks]:
    """Open a page with its header; jobs of a visitor who closes it are stopped."""
    with Page(title="vargen", analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        head = f"<h1>vargen</h1><p>{intro} Model: <b>{text(model)}</b></p>"
        gr.HTML(f'<div class="vg-head">{head}</div>')
        gr.Button("Light / dark", size="sm", elem_id="theme").click(None, js=_TOGGLE_DARK, api_visibility="private")
        yield page

        def stop_visitor_jobs(request: gr.Request) -> None:
            registry.stop_visitor_jobs(request.session_hash or "")

        page.unload(stop_visitor_jobs)
    # After each request, gradio rebuilds a table of all requests for a dashboard that is not served here.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", str(2**31))
    page.queue(max_size=_MAX_QUEUE, default_concurrency_limit=concurrency)


def build_theme() -> gr.themes.Base:
    """Return the theme, light and dark: system fonts, one accent color, and no requests to other servers."""
    colors = {
        "block_title_background_fill": "none",
        "block_title_text_color": "*neutral_700",
        "block_label_background_fill": "none",
        "block_label_text_color": "*neutral_700",
        "block_border_width": "1px",
    }
    dark = {**colors, "block_title_text_color": "*neutral_200", "block_label_text_color": "*neutral_200"}
    return gr.themes.Soft(
        primary_hue="indigo",
        secondary_hue="indigo",
        neutral_hue="slate",
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "Consolas", "monospace"],
    ).set(
        body_background_fill="*neutral_100",
        body_background_fill_dark="*neutral_950",
        block_title_padding="0",
        block_label_text_size="*text_sm",
        **colors,
        **{f"{name}_dark": value for name, value in dark.items()},
    )

"""The page of a video model."""

from __future__ import annotations

from typing import Any

import gradio as gr

from vargen.demo import rendering as figures
from vargen.demo import theme, video_tab
from vargen.demo.jobs import Runs
from vargen.demo.refusals import Page
from vargen.demo.video_tab import VideoEngine


def build(engine: VideoEngine, concurrency: int = 1) -> gr.Blocks:
    """Build the page.

    Args:
        concurrency: maximum number of concurrent videos over all visitors; the others wait in one queue.
    """
    runs = Runs()
    private: dict[str, Any] = {"concurrency_id": "draw", "concurrency_limit": concurrency, "api_visibility": "private"}
    with Page(title="vargen", analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        gr.HTML(
            '<div class="vg-head"><h1>vargen</h1><p>A video is made block by block. A small model drafts, a scorer looks, and '
            f"the large model draws what is not good enough. Model: <b>{figures.text(engine.name)}</b></p></div>"
        )
        gr.Button("Light / dark", size="sm", elem_id="theme").click(None, js=theme.TOGGLE, api_visibility="private")
        with gr.Row():
            with gr.Column(scale=4, min_width=300):
                prompt = gr.Textbox("waving hand", label="Prompt", elem_id="prompt", max_length=500)
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1, elem_id="seed")
                own = video_tab.controls(engine)
            with gr.Column(scale=7, min_width=320):
                outputs = video_tab.screen()
        starts = video_tab.wire(engine, runs, prompt, seed, own, outputs, private)
        starts(prompt.submit)

        def leave(request: gr.Request) -> None:
            runs.leave(request.session_hash or "")

        page.unload(leave)
    page.queue(max_size=32, default_concurrency_limit=concurrency)
    return page

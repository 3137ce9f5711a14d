"""The page: header, inputs and tabs, and the options with which it is served."""

from __future__ import annotations

import os
import warnings
from typing import Any

import gradio as gr

from vargen.demo import api, explore_tab, generate_tab, inputs, live_tab, race_tab, theme, video_tab
from vargen.demo.address import Address
from vargen.demo.image_service import Engine
from vargen.demo.jobs import Runs
from vargen.demo.refusals import HANDLERS, Page
from vargen.demo.rendering import text
from vargen.demo.video_tab import VideoEngine

_LONGEST_QUEUE = 32
# Enter in the prompt presses the button of the open tab: the buttons of the other tabs are not laid out.
_PRESS_OPEN = f"() => {{ [...document.querySelectorAll('.{inputs.START}')].find(each => each.offsetParent)?.click(); }}"


def build(engine: Engine, concurrency: int = 1, video: VideoEngine | None = None) -> gr.Blocks:
    """Build the page of a loaded model.

    Args:
        concurrency: maximum number of concurrent runs over all visitors; the others wait in one queue.
        video: a video model, which gets its own tab.
    """
    runs = Runs()
    draw_options: dict[str, Any] = {"concurrency_id": "draw", "concurrency_limit": concurrency}
    private: dict[str, Any] = {**draw_options, "api_visibility": "private"}
    with Page(title="vargen", analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        gr.HTML(
            '<div class="vg-head"><h1>vargen</h1><p>A picture is drawn token by token. Watch methods that need fewer '
            f"passes of the network. Model: <b>{text(engine.name)}</b></p></div>"
        )
        dark = gr.Button("Light / dark", size="sm", elem_id="theme")
        dark.click(None, js=theme.TOGGLE, api_visibility="private")
        with gr.Row():
            with gr.Column(scale=4, min_width=300):
                shared = inputs.build(engine)
            with gr.Column(scale=7, min_width=320), gr.Tabs():
                with gr.Tab("Generate") as first:
                    method, note = generate_tab.build(engine, runs, shared, private)
                tabs = [first]
                with gr.Tab("Race") as race:
                    race_tab.build(engine, runs, shared, private)
                tabs.append(race)
                if engine.relaxes:
                    with gr.Tab("Explore") as explore:
                        explore_tab.build(engine, runs, shared, private)
                    tabs.append(explore)
                if video is not None:
                    with gr.Tab("Video") as moving:
                        video_tab.build(video, runs, shared, private)
                    tabs.append(moving)
                if engine.live:
                    with gr.Tab("Live") as live:
                        live_tab.build(engine, runs, shared, tabs, live, private)
        shared.prompt.submit(None, js=_PRESS_OPEN, api_visibility="private")
        inputs.reload_on_drop(engine, shared, method, note)
        api.build(engine, draw_options)

        def leave(request: gr.Request) -> None:
            runs.leave(request.session_hash or "")

        page.unload(leave)
    # After each request, gradio rebuilds a table of all requests for a dashboard that is not served here.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", str(2**31))
    page.queue(max_size=_LONGEST_QUEUE, default_concurrency_limit=concurrency)
    return page


def serve(page: gr.Blocks, address: Address) -> str:
    """Serve the page from background threads; returns its address.

    Raises:
        OSError: if the port is in use.
    """
    try:
        _launch(page, address)
    except OSError as error:
        if "empty port" not in str(error):
            raise
        raise OSError(address.taken) from error  # gradio's message names an argument that the user did not give
    return page.local_url


def _launch(page: gr.Blocks, address: Address) -> None:
    # Before 6.20, gradio reads this deprecated status code at each request, and newer Starlette versions warn on stderr.
    warnings.filterwarnings("ignore", "'HTTP_422_UNPROCESSABLE_ENTITY' is deprecated", UserWarning, r"gradio\.routes")
    page.launch(
        server_name=address.host,
        server_port=address.port,
        share=False,
        show_error=True,
        app_kwargs={"exception_handlers": HANDLERS},
        ssr_mode=False,
        pwa=False,
        enable_monitoring=False,
        max_file_size="5mb",
        strict_cors=True,
        footer_links=["api"],
        theme=theme.theme(),
        css_paths=theme.CSS,
        favicon_path=theme.FAVICON,
        quiet=True,
        prevent_thread_lock=True,
    )

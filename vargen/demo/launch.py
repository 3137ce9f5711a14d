"""Starts the demo: checks the address, loads the models, and serves the page."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vargen.assets import packaged_models
from vargen.device import select_device, set_threads

if TYPE_CHECKING:
    import gradio as gr

    from vargen.demo.page import Models

# Models that have a mode on the page of the packaged image model, and the one whose images the page opens on.
DEFAULT_MODEL, EDIT_MODEL, VIDEO_MODEL = "emoji", "emoji-var", "emoji-video"
HOST_VARIABLE, PORT_VARIABLE = "GRADIO_SERVER_NAME", "GRADIO_SERVER_PORT"
_LOCAL = "localhost,127.0.0.1,::1"  # gradio asks itself whether it runs, which no proxy can answer


def validate_address(host: str, port: int | None) -> None:
    """Raise ValueError unless a server can bind to this address; `port` None: to a free one."""
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(host or "empty", port or 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: closed sockets may linger
                probe.bind(place)
    except OSError as error:
        raise ValueError(f"cannot serve at --host {host!r}, --port {port or 'any'}: {error.strerror or error}") from error


def is_local(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_models(model: str, device_name: str, scorer_name: str | None) -> Models:
    """Load the models; beside a packaged image model, the other packaged ones, too.

    Raises:
        ValueError, OSError, RuntimeError, ImportError: for a model or scorer that cannot be loaded.
    """
    from vargen.demo.page import Models
    from vargen.pipelines.loading import inspect_model, open_pipeline
    from vargen.pipelines.start_images import find_image_model
    from vargen.scoring import default_scorer, open_scorer

    device = select_device(device_name)

    def load(name: str | Path) -> Any:
        pipe = open_pipeline(inspect_model(name).folder, device=device)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    info = inspect_model(model)
    chosen = scorer_name or default_scorer(model) or "none"
    scorer = None if chosen == "none" else open_scorer(chosen, device)
    # A path reveals something about this machine to visitors; its last part does not.
    name = Path(model).resolve().name if Path(model).is_dir() else model
    if info.fps is not None:
        image_model = find_image_model(info)
        return Models(name, video=load(model), scorer=scorer, image_pipe=image_model and load(image_model.folder))
    packaged, pipe = set(packaged_models()), load(model)
    video = load(VIDEO_MODEL) if {model, VIDEO_MODEL} <= packaged else None
    edit = load(EDIT_MODEL) if model == DEFAULT_MODEL and EDIT_MODEL in packaged else None
    if pipe.image_size is not None:
        edit = pipe
    return Models(name, pipe, edit, video, pipe, scorer, model == DEFAULT_MODEL)


def serve(page: gr.Blocks, host: str, port: int | None) -> str:
    """Serve the page from background threads; returns its address. OSError is raised if the port is in use."""
    from vargen.demo.look import CSS, FAVICON, STREAMS, build_theme
    from vargen.demo.malformed_requests import HANDLERS, MIDDLEWARE

    # Before 6.20, gradio reads this deprecated status code at each request, and newer Starlette versions warn on stderr.
    warnings.filterwarnings("ignore", "'HTTP_422_UNPROCESSABLE_ENTITY' is deprecated", UserWarning, r"gradio\.routes")
    # After each request, gradio rebuilds a table of all requests for a dashboard that is not served here.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", str(2**31))
    try:
        page.launch(
            server_name=host,
            server_port=port,
            share=False,
            show_error=True,
            app_kwargs={"exception_handlers": HANDLERS, "middleware": MIDDLEWARE},
            ssr_mode=False,
            pwa=False,
            enable_monitoring=False,
            max_file_size="5mb",
            strict_cors=True,
            footer_links=["settings"],
            theme=build_theme(),
            css_paths=CSS,
            favicon_path=FAVICON,
            head=f"<script>{STREAMS.read_text('utf-8')}</script>",
            quiet=True,
            prevent_thread_lock=True,
        )
    except OSError as error:
        if "empty port" not in str(error):
            raise
        raise OSError(f"--port {port or 'from 7860'} is used by another program") from error
    return str(page.local_url)


def run_page(
    model: str, host: str, port: int | None, device: str, scorer: str | None, concurrency: int, threads: int | None
) -> None:
    """Load the models and serve the page until it is interrupted; see `vargen demo --help`.

    Raises:
        ValueError, OSError, RuntimeError, ImportError: for an address that cannot be used, and a model or scorer that cannot be
            loaded.
    """
    validate_address(host, port)
    set_threads(threads)
    for variable in (HOST_VARIABLE, PORT_VARIABLE):  # gradio would read them again, over the options
        os.environ.pop(variable, None)
    for variable in ("no_proxy", "NO_PROXY"):
        os.environ[variable] = ",".join(filter(None, [os.environ.get(variable), _LOCAL]))
    with tempfile.TemporaryDirectory(prefix="vargen-app-") as folder:
        # Read when gradio is imported: no statistics to anyone, and one folder that is removed at the end.
        os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=folder, HF_HUB_DISABLE_TELEMETRY="1")
        try:
            from vargen.demo.page import build_page
        except ModuleNotFoundError as error:
            raise ImportError(f'{error.name} is not installed; run: pip install -c constraints.txt -e ".[demo]"') from None
        models = load_models(model, device, scorer)
        if not is_local(host):
            print("Everyone who can reach this machine can use the page; it has no password.", flush=True)
        page = build_page(models, concurrency)
        try:
            print(f"vargen runs at {serve(page, host, port)}  (Ctrl-C ends it)", flush=True)
            page.block_thread()
        finally:
            page.close(verbose=False)

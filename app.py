"""The demo: `python app.py`, then open the address that it prints. `python app.py --help` has the options."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from vargen.assets import packaged_models
from vargen.demo.address import HOST_VARIABLE, PORT_VARIABLE, chosen
from vargen.device import select_device, set_threads

VIDEO = "emoji-video"  # has a tab beside the packaged models of pictures


def main() -> None:
    """Load the model and serve the page."""
    parser = argparse.ArgumentParser(description="Draw in the browser, and watch methods race.")
    parser.add_argument("--model", default="emoji", metavar="NAME|DIR", help="a packaged model, or a folder (default: emoji)")
    parser.add_argument(
        "--host", help="address to serve at; 0.0.0.0 lets other machines in (default: GRADIO_SERVER_NAME, else 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, help="default: GRADIO_SERVER_PORT, else the first free one from 7860")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: a GPU where there is one")
    parser.add_argument(
        "--scorer", metavar="NAME", help="scores pictures, as of `vargen score`; none: nothing does (default: emoji-scorer for "
        "packaged models)"
    )  # fmt: skip
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="drawings at the same time (default: 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as many as pay, measured)")
    options = parser.parse_args()
    if not 1 <= options.concurrency <= 16:
        parser.error(f"--concurrency must be from 1 to 16, got {options.concurrency}")
    try:
        address = chosen(options.host, options.port, os.environ)
        address.check()
        set_threads(options.threads)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for variable in (HOST_VARIABLE, PORT_VARIABLE):  # gradio would read them again, and stop at one that an option overrides
        os.environ.pop(variable, None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the folders below are removed then, too
    with tempfile.TemporaryDirectory(prefix="vargen-app-") as folder:
        # Read when gradio is imported: no statistics to anyone, and one folder that vanishes with the app.
        os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=folder, HF_HUB_DISABLE_TELEMETRY="1")
        try:
            from vargen.demo import page, video_page
            from vargen.demo.image_service import Engine
            from vargen.demo.video_tab import VideoEngine
        except ModuleNotFoundError as error:
            sys.exit(f'{error.name} is not installed; run: pip install -c constraints.txt -e ".[demo]"')
        from vargen.pipelines.loading import default_dtype
        from vargen.pipelines.registry import describe, open_pipeline
        from vargen.scoring.registry import default_scorer, open_scorer

        try:
            device = select_device(options.device)
            saved = describe(options.model).folder
            name = options.scorer or default_scorer(options.model) or "none"
            scorer = None if name == "none" else open_scorer(name, device)
            pipe = open_pipeline(saved, torch_dtype=default_dtype(saved, device)).to(device)
            makes_video = describe(saved).fps is not None
            other = VIDEO if not makes_video and {options.model, VIDEO} <= set(packaged_models()) else None
            place = describe(other).folder if other else saved
            moving = open_pipeline(place, torch_dtype=default_dtype(place, device)).to(device) if other else None
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            sys.exit(f"error: {error}")
        # A path tells visitors about this machine; its last part does not.
        shown = Path(options.model).resolve().name if Path(options.model).is_dir() else options.model
        engine = VideoEngine(pipe, shown, scorer) if makes_video else Engine(pipe, shown, scorer, name)
        video = VideoEngine(moving, VIDEO, scorer) if moving else None
        if not address.local:
            print("Everyone who reaches this machine can draw here; nothing asks for a password.", flush=True)
        if makes_video:
            served = video_page.build(engine, options.concurrency)
        else:
            served = page.build(engine, options.concurrency, video)
        try:
            print(f"vargen draws at {page.serve(served, address)}  (Ctrl-C ends it)", flush=True)
            served.block_thread()
        except OSError as error:
            sys.exit(f"error: {error}")
        finally:
            served.close(verbose=False)
            engine.close()
            if video:
                video.close()


if __name__ == "__main__":
    main()

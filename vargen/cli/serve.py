"""`vargen serve`: generate for many clients at once behind OpenAI's HTTP interface."""

from __future__ import annotations

import ipaddress
import os
from typing import Annotated, Any, Literal

import typer

from vargen.cli import common
from vargen.cli.console import print_status
from vargen.compat import installed_version

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def serve_model(
    ctx: typer.Context,
    model: common.ModelName = "emoji",
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0: a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="The model's name for clients. Default: its own.")] = None,
    accelerator: common.Method = None,
    guidance_scale: common.Guidance = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Images generated at a time. Default: 4, and 1 video.")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=1, metavar="N", help="Images that may wait for a slot; more are refused with status 429.")
    ] = 64,
    max_images: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Largest n of a request.")] = 10,
    timeout: Annotated[
        float, typer.Option(min=1e-3, max=86400, metavar="SECONDS", help="A request that takes longer is cancelled.")
    ] = 120.0,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Web page whose scripts may use the service, such as https://example.org; *: any."),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="ray: replicas on Ray Serve, in other processes or machines (needs the extra `ray`)."),
    ] = "local",
    replicas: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Of --engine ray, each with --slots. Default: 1.")
    ] = None,
    dtype: common.Dtype = "auto",
    quantization: common.Quantization = None,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Serve a model by OpenAI's HTTP interface until Ctrl-C.

    The environment variable VARGEN_API_KEY, if it is set, is the key that clients must send.
    """
    for package in _PACKAGES:
        if installed_version(package) is None:
            raise ImportError(f'vargen serve needs {package}: pip install -c constraints.txt -e ".[serve]"')
    if engine == "local":
        common.reject(ctx, "needs --engine ray", "replicas")
    from vargen.serving.api import RequestLimits, build_app
    from vargen.serving.server import open_socket, read_api_key, run_server, warm_up

    limits, key = RequestLimits(images=max_images, seconds=timeout), read_api_key(os.environ)
    inspected = common.inspect(ctx, model)
    from vargen.pipelines.loading import open_pipeline
    from vargen.serving.engine import GenerationThread

    if accelerator is not None:
        inspected.validate_method(accelerator)
    machine = common.loading(ctx, inspected.folder)
    listener = open_socket(host, port)  # before weights are loaded
    title, slots = name or common.title_of(model), slots or (4 if inspected.fps is None else 1)
    load = {"name": str(inspected.folder), **machine}
    run: dict[str, Any] = {"accelerator": accelerator, "guidance_scale": guidance_scale, "slots": slots}
    if engine == "ray":
        from vargen.serving.ray import ReplicaSchedule, close_replicas

        schedule = ReplicaSchedule(replicas or 1, title, load, run, threads or 1)
        generation = GenerationThread(schedule, max_waiting=max_waiting)
    else:
        pipe = open_pipeline(**load)
        generation = GenerationThread(pipe, max_waiting=max_waiting, **run)
    try:
        card = schedule.card if engine == "ray" else warm_up(pipe, generation, title)
        app = build_app(card, generation, limits, key, allow_origin or ())
        if not _is_local(host) and key is None:
            print_status("Everyone who can reach this machine can use the service: VARGEN_API_KEY is not set.")
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1"
        run_server(app, listener, limits, f"vargen serves {title} at {address}  (Ctrl-C ends it)")
    finally:
        generation.close(drain=False, timeout=30)
        if engine == "ray":
            close_replicas()


def _is_local(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

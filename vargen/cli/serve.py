"""`vargen serve`: generate for many clients at once behind OpenAI's HTTP interface."""

from __future__ import annotations

import ipaddress
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vargen.cli.console import print_status, quiet_libraries
from vargen.cli.options import (
    Device,
    DeviceName,
    Dtype,
    DtypeName,
    Guidance,
    ModelName,
    QuantizationName,
    Threads,
    check_names,
    makes_video,
    reject_options,
    require_device,
    select_dtype,
)
from vargen.compat import installed_version
from vargen.device import set_threads

_MAX_SECONDS = 86400
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


class ServeEngine(StrEnum):
    local = "local"
    ray = "ray"


def serve_model(
    model: ModelName = "emoji",
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to serve at; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0: a free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Name of the model for clients. Default: its own."),
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Method of all requests. Default: the model's.")
    ] = None,
    guidance_scale: Guidance = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Images generated at a time. Default: 4, and 1 video.")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=1, metavar="N", help="Images that may wait for a slot; more are refused with status 429.")
    ] = 64,
    max_images: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Largest n of a request.")] = 10,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="A request that takes longer is cancelled.")] = 120.0,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Web page whose scripts may use the service, such as https://example.org; *: any."),
    ] = None,
    engine: Annotated[
        ServeEngine, typer.Option(help="ray: replicas on Ray Serve, in other processes or machines (needs the extra `ray`).")
    ] = ServeEngine.local,
    replicas: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Of --engine ray, each with --slots. Default: 1.")
    ] = None,
    dtype: DtypeName = Dtype.auto,
    quantization: QuantizationName = None,
    device: DeviceName = Device.auto,
    threads: Threads = None,
) -> None:
    """Serve a model by OpenAI's HTTP interface until Ctrl-C.

    The environment variable VARGEN_API_KEY, if it is set, is the key that clients must send.
    """
    for package in _PACKAGES:
        if installed_version(package) is None:
            raise ImportError(f'vargen serve needs {package}: pip install -c constraints.txt -e ".[serve]"')
    check_names(model, () if accelerator is None else [accelerator])
    from vargen.serving.api import read_api_key
    from vargen.serving.model_card import RequestLimits

    if not 0 < timeout <= _MAX_SECONDS:
        raise ValueError(f"timeout must be over 0 and at most {_MAX_SECONDS} seconds, got {timeout:g}")
    if engine is ServeEngine.local:
        reject_options("needs --engine ray", replicas=replicas)
    limits, key = RequestLimits(images=max_images, seconds=timeout), read_api_key(os.environ)
    is_video = makes_video(model)
    if is_video:
        reject_options("is for image models, and this model generates video", guidance_scale=guidance_scale)
    set_threads(threads)
    quiet_libraries()
    place = require_device(device)

    from vargen.decoding import resolve_method
    from vargen.models.guidance import Guidance
    from vargen.pipelines.loading import inspect_model
    from vargen.serving.api import build_app
    from vargen.serving.server import open_served_model, open_socket, run_server, warm_up

    inspected = inspect_model(model)
    if accelerator is not None:
        inspected.validate_method(resolve_method(accelerator, inspected.paradigm))
    if guidance_scale is not None:
        Guidance(guidance_scale)
    listener = open_socket(host, port)  # before weights are loaded
    title = name or (Path(model).resolve().name if Path(model).is_dir() else model)
    folder = inspected.folder
    weights = str(select_dtype(dtype, place, folder, quantization)).removeprefix("torch.")
    slots = slots or (1 if is_video else 4)
    generator: Any
    if engine is ServeEngine.ray:
        from vargen.serving.ray import RayReplicas, ReplicaOptions

        loaded = (str(folder), title, str(place), weights, quantization)
        generator = RayReplicas(
            ReplicaOptions(*loaded, accelerator, guidance_scale, slots, threads), replicas or 1, max_waiting
        )
    else:
        from vargen.serving.engine import GenerationThread

        pipe = open_served_model(str(folder), str(place), weights, quantization)
        generator = GenerationThread(
            pipe, accelerator, slots=slots, max_waiting=max_waiting, guidance_scale=guidance_scale
        )  # fmt: skip
    try:
        card = generator.card if engine is ServeEngine.ray else warm_up(pipe, generator, title)
        app = build_app(card, generator, limits, key, allow_origin or ())
        if not _is_local(host) and key is None:
            print_status("Everyone who can reach this machine can use the service: VARGEN_API_KEY is not set.")
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1"
        run_server(app, listener, limits, lambda: print(f"vargen serves {title} at {address}  (Ctrl-C ends it)", flush=True))
    finally:
        generator.close(drain=False, timeout=30)


def _is_local(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

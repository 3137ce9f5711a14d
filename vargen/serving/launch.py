"""Starting the service: the socket, the model, a first image that allocates all memory, and the server until it is stopped."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from vargen.decoding import Sampling
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.pipelines.loading import open_pipeline
from vargen.serving.generation import GenerationThread
from vargen.serving.http_protocol import LimitedProtocol
from vargen.serving.limits import RequestLimits
from vargen.serving.model_card import ModelCard
from vargen.serving.tasks import ImageTask

_SHUTDOWN_SECONDS = 10  # beyond the time of a request
_HEADER_BYTES = 16 * 1024


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine.

    Raises:
        ValueError: for a host that does not exist.
        OSError: if the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except socket.gaierror as error:
        raise ValueError(f"host must be a name or an address of this machine, got {host!r}") from error
    except OSError as error:
        raise OSError(f"host {host!r} and port {port} cannot be used: {error.strerror or error}") from error


def open_served_model(model: str, device: str, dtype: str, quantization: str | None) -> VisualPipeline:
    """Open a model for the service.

    Args:
        model: name or folder. device: such as `"cpu"`. dtype: such as `"float32"`. quantization: see `open_pipeline`.
    """
    pipe = open_pipeline(model, device=device, torch_dtype=getattr(torch, dtype), quantization=quantization)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def warm_up(pipe: VisualPipeline, generation: GenerationThread, name: str) -> ModelCard:
    """Generate a first image, so that memory is allocated and widths are measured before the first client comes.

    Returns the description of the model.

    Raises:
        Exception: as the generation of an image, if the model does not work.
    """
    if isinstance(pipe, CausalVideoPipeline):
        return ModelCard.of_video(pipe, name)
    subject = 0 if pipe.is_class_conditional else "a red apple"
    [handle] = generation.submit([ImageTask(subject, 0, Sampling())])
    return ModelCard.of_images(pipe, name, handle.result().image.size)


def configure_server(app: FastAPI, limits: RequestLimits, log_level: str = "warning") -> uvicorn.Config:
    """Return the configuration of a server that no client can take down alone."""
    protocol: Any = partial(LimitedProtocol, limits)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level=log_level,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(limits.seconds) + _SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=_HEADER_BYTES,
    )


def run_server(app: FastAPI, listener: socket.socket, limits: RequestLimits, on_ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, and then finish the requests that were accepted. A second signal ends them.

    Args:
        app: see `build_app`.
        listener: a listening socket, which is closed at the end.
        limits: whose seconds limit the shutdown, too.
        on_ready: called when requests are answered.
    """
    server = _Server(configure_server(app, limits), on_ready)
    # uvicorn raises the signal again when it has shut down; what follows still has to run then.
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        listener.close()
    if not server.started:
        sys.exit(1)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]):
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

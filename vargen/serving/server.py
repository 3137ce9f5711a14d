"""The server: its socket, the model with a first image that allocates all memory, and connections that are bounded.

Headers have a bounded size and time, and connections a bounded number, also of one address. This is uvicorn's protocol on h11,
which is chosen whatever else is installed: that on httptools buffers an endless header.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
import torch
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from vargen.decoding import Sampling
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.pipelines.loading import open_pipeline
from vargen.serving.engine import GenerationThread
from vargen.serving.errors import APIError
from vargen.serving.model_card import ModelCard, RequestLimits
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
        return ModelCard.of(pipe, name)
    subject = 0 if pipe.is_class_conditional else "a red apple"
    [handle] = generation.submit([ImageTask(subject, 0, Sampling())])
    return ModelCard.of(pipe, name, handle.result().image.size)


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


class LimitedProtocol(H11Protocol):
    """A connection that is closed if its header is too large or too slow, or if there are too many.

    Args:
        limits: of connections. options: of uvicorn.
    """

    def __init__(self, limits: RequestLimits, **options: Any):
        super().__init__(**options)
        self.limits = limits
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (refusal := self._find_refusal()) is not None:
            self._refuse(refusal)
        else:
            self._time_header()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)
            self._time_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        hint = getattr(sys.exception(), "error_status_hint", 400)  # called where h11's error is handled
        if hint == 431:
            self._refuse(APIError(431, "The header of the request is too large.", code="header_too_large"))
        else:
            self._refuse(APIError(400, "This is no valid HTTP request.", code="invalid_http"))

    def _find_refusal(self) -> APIError | None:
        """Return why this connection is refused; None if it is not."""
        own = self.client and self.client[0]
        of_address = sum(1 for each in self.connections if (client := getattr(each, "client", None)) and client[0] == own)
        if len(self.connections) > 2 * self.limits.connections:
            return APIError(503, "Too many connections at a time.", code="overloaded", headers={"Retry-After": "1"})
        if own is not None and of_address > self.limits.connections_per_address:
            message = "Too many connections from your address at a time."
            return APIError(503, message, code="overloaded", headers={"Retry-After": "1"})
        return None

    def _time_header(self) -> None:
        """Start the clock where a header is awaited, and stop it where one is complete. Pieces of one do not restart it."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.limits.header_seconds, self._end_slow_header)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end_slow_header(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(APIError(408, "The header of the request did not arrive in time.", code="timeout"))

    def _refuse(self, error: APIError) -> None:
        """Answer in OpenAI's shape, and close the connection."""
        self._stop_timer()
        if self.cycle is not None:  # a request whose body is no HTTP: it learns that its client is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            fields = {"content-type": "application/json", "connection": "close", **(error.headers or {})}
            headers = [(name.lower(), value) for name, value in {**fields, "content-length": str(len(body))}.items()]
            for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

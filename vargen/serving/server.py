"""The server: its socket, a first image that allocates all memory, and connections that are bounded.

Headers have a bounded size and time, and connections a bounded number, also of one address. This is uvicorn's protocol on h11,
which is chosen whatever else is installed: that on httptools buffers an endless header.
"""

from __future__ import annotations

import asyncio
import errno
import re
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from vargen.decoding import Sampling
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.serving.api import ModelCard, RequestLimits
from vargen.serving.engine import GenerationThread
from vargen.serving.errors import APIError
from vargen.serving.tasks import ImageTask

KEY_VARIABLE = "VARGEN_API_KEY"
_SHUTDOWN_SECONDS = 10  # beyond the time of a request
_HEADER_BYTES = 16 * 1024


def read_api_key(environment: Mapping[str, str]) -> str | None:
    key = environment.get(KEY_VARIABLE)
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{KEY_VARIABLE} must be printable ASCII characters without spaces, or not set")
    return key


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine.

    Raises ValueError if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except socket.gaierror as error:
        raise ValueError(f"host must be a name or an address of this machine, got {host!r}") from error
    except OSError as error:
        reason = "is taken; choose another one" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ValueError(f"port {port} of host {host!r} {reason}") from error


def warm_up(pipe: VisualPipeline, generation: GenerationThread, name: str) -> ModelCard:
    """Return the description of a model, after a first image, which allocates memory and measures widths."""
    if isinstance(pipe, CausalVideoPipeline):
        geometry = pipe.transformer.geometry
        first, others = (geometry.pixel_frames(start, geometry.block_frames) for start in (0, geometry.block_frames))
        size, blocks = geometry.pixel_size[::-1], int(pipe.setting("num_blocks"))
        return ModelCard(name, size, fps=pipe.fps, block_frames=(first, others), num_blocks=blocks)
    subject = 0 if pipe.is_class_conditional else "a red apple"
    [handle] = generation.submit([ImageTask(subject, 0, Sampling())])
    return ModelCard(
        name=name,
        size=handle.result().image.size,
        vocab_size=pipe.vocab_size,
        num_classes=pipe.num_classes,
        class_names={each.strip().lower(): number for number, names in pipe.class_names.items() for each in names.split(",")},
        defaults={name: value for name, value in pipe.default_sampling.items() if name != "guidance_scale"},
        edits_images=pipe.image_size is not None,
    )


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


def run_server(app: FastAPI, listener: socket.socket, limits: RequestLimits, greeting: str) -> None:
    """Print the greeting and serve until SIGINT or SIGTERM; finish what was accepted, unless there is a second signal."""
    server = uvicorn.Server(configure_server(app, limits))

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn raises the signal again when it has shut down; what follows still has to run then.
    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    print(greeting, flush=True)
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        listener.close()


class LimitedProtocol(H11Protocol):
    """A connection that is closed if its header is too large or too slow, or if there are too many."""

    def __init__(self, limits: RequestLimits, **options: Any):
        super().__init__(**options)
        self.limits = limits
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        clients = [client[0] for each in self.connections if (client := getattr(each, "client", None))]
        is_full = self.client is not None and clients.count(self.client[0]) > self.limits.connections_per_address
        if is_full or len(self.connections) > 2 * self.limits.connections:
            place = " from your address" if is_full else ""
            message = f"Too many connections{place} at a time."
            self._refuse(APIError(503, message, "overloaded", headers={"Retry-After": "1"}))
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
        message, code = ("The header is too large.", "header_too_large") if hint == 431 else (msg, "invalid_http")
        self._refuse(APIError(431 if hint == 431 else 400, message, code))

    def _time_header(self) -> None:
        """Start the clock where a header is awaited, and stop it where it is complete."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._header_timer is None:
            late = APIError(408, "The header of the request did not arrive in time.", "timeout")
            self._header_timer = self.loop.call_later(self.limits.header_seconds, self._refuse, late)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, error: APIError) -> None:
        """Answer in OpenAI's shape, and close the connection."""
        self._stop_timer()
        if self.cycle is not None:  # a request whose body is no HTTP: it learns that its client is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            answer = JSONResponse(error.body, error.status_code, {"connection": "close", **(error.headers or {})})
            response = h11.Response(status_code=answer.status_code, headers=answer.raw_headers)
            for event in (response, h11.Data(bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

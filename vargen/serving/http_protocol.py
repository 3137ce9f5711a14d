"""HTTP on a connection: headers of bounded size and time, and a bounded number of connections, also of one address.

This is uvicorn's protocol on h11, which is chosen whatever else is installed: that on httptools buffers an endless header.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vargen.serving.errors import APIError
from vargen.serving.limits import RequestLimits


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
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            fields = {"content-type": "application/json", "connection": "close", **(error.headers or {})}
            headers = [(name.lower(), value) for name, value in {**fields, "content-length": str(len(body))}.items()]
            for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

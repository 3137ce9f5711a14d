"""Work for a client that may go away: it is stopped as soon as the connection is closed, or its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from vargen.serving.errors import APIError

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The client closed the connection."""


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, _T], seconds: float) -> _T:
    """Run a coroutine for a client whose body has been read.

    Raises:
        ClientGoneError, TimeoutError: if the client went away, or the time is over; the coroutine was then cancelled.
    """
    running, gone = asyncio.create_task(work), asyncio.create_task(_wait_until_gone(receive))
    try:
        done, _ = await asyncio.wait({running, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if running in done:
            return running.result()
        raise ClientGoneError if gone in done else TimeoutError
    finally:
        running.cancel()
        gone.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


class StreamedBody(Response):
    """A response whose chunks are sent as they are made, while the client is there.

    Args:
        chunks: of the body.
        media_type: of the body.
        seconds: after which the connection is closed, also if the client does not read.
        on_end: called at the end, in any case.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str, seconds: float, on_end: Callable[[], None]):
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self.chunks, self.seconds, self.on_end = chunks, seconds, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGoneError, TimeoutError, OSError, APIError):
                await run_while_connected(receive, self._send(send), self.seconds)
        finally:
            self.on_end()

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self.chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.chunks.aclose()

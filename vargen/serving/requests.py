"""What requests for images and videos have in common: checks of fields, and events of tasks while a client waits."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from vargen.pipelines import validation
from vargen.serving.engine import Generator
from vargen.serving.errors import APIError, ClientGoneError, refuse
from vargen.serving.model_card import ModelCard, RequestLimits
from vargen.serving.tasks import Event, GeneratedImage, GeneratedVideo, ImageTask, TaskFailed, TaskHandle, VideoTask
from vargen.values import MAX_SEED, short_repr

_T = TypeVar("_T")


def check_model(model: Any, size: Any, card: ModelCard) -> None:
    """Raise APIError for another model, or another size than that of its images."""
    if model not in (None, card.name):
        message = f"The model {short_repr(model)} does not exist; this server has {card.name!r}."
        raise APIError(404, message, param="model", code="model_not_found")
    if size not in (None, "auto", card.size_name):
        raise refuse("size", f"must be {card.size_name!r}, the only one of this model, got {short_repr(size)}")


def check_prompt(prompt: str, limits: RequestLimits) -> str:
    """Return a prompt. Raises APIError if it is empty, too long or not text."""
    if len(prompt) > limits.prompt_characters:
        raise refuse("prompt", f"must have at most {limits.prompt_characters} characters, got {len(prompt)}")
    try:
        validation.validate_prompts(prompt)
    except ValueError as error:
        message = str(error).replace("prompt[0]", "prompt").removeprefix("prompt ")
        raise refuse("prompt", message) from None
    return prompt


def choose_seed(seed: int | None, count: int = 1) -> int:
    """Return the seed of the first of `count` images; a random one for None and -1. Raises APIError if it is out of range."""
    if seed is None or seed == -1:
        return secrets.randbelow(2**32)
    if not 0 <= seed <= MAX_SEED - count + 1:
        raise refuse("seed", f"must be from 0 to {MAX_SEED - count + 1}, or -1 for a random one, got {short_repr(seed)}")
    return seed


class Job:
    """The tasks of a request, as an iterator over their events until all have ended: `(number of the task, event)`.

    Args:
        generator: generates them.
        tasks: that are submitted.
        seconds: after which the iterator raises TimeoutError.
    """

    def __init__(self, generator: Generator, tasks: Sequence[ImageTask | VideoTask], seconds: float):
        self._events, loop = asyncio.Queue[tuple[TaskHandle, Event]](), asyncio.get_running_loop()
        self._deadline = time.monotonic() + seconds
        self.handles = generator.submit(tasks, lambda *event: loop.call_soon_threadsafe(self._events.put_nowait, event))

    async def __aiter__(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield events; raises the error of the first task that fails. All tasks are cancelled at the end."""
        left = len(self.handles)
        try:
            while left:
                async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                    handle, event = await self._events.get()
                if isinstance(event, TaskFailed):
                    raise event.error
                left -= isinstance(event, GeneratedImage | GeneratedVideo)
                yield self.handles.index(handle), event
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel what has not ended."""
        for handle in self.handles:
            handle.cancel()


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, _T], seconds: float | None = None) -> _T:
    """Run a coroutine for a client whose body has been read.

    Raises:
        ClientGoneError, TimeoutError: if the client went away, or the time is over; the coroutine was then cancelled.
    """

    async def wait_until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    running, gone = asyncio.create_task(work), asyncio.create_task(wait_until_gone())
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

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        seconds: float,
        on_end: Callable[[], object] = lambda: None,
    ):
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


class KeptFiles(OrderedDict[str, _T]):
    """Images or videos by unguessable names, in memory; nothing is written to a disk.

    Args:
        size_of: returns the bytes of one.
        max_bytes: the oldest ones are dropped while they exceed it together.
    """

    def __init__(self, size_of: Callable[[_T], int], max_bytes: int):
        super().__init__()
        self.size_of, self.max_bytes = size_of, max_bytes

    def keep(self, file: _T) -> str:
        """Keep a file, and return its name."""
        name = secrets.token_urlsafe(24)
        self[name] = file
        self.drop_oldest()
        return name

    def drop_oldest(self) -> None:
        """Drop the oldest files, but for the last one."""
        while len(self) > 1 and sum(map(self.size_of, self.values())) > self.max_bytes:
            self.popitem(last=False)

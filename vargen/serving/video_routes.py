"""`POST /v1/videos`: an MP4 that plays while it is generated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from vargen.mp4 import Mp4Writer
from vargen.serving.connections import StreamedBody, run_while_connected
from vargen.serving.errors import to_api_error
from vargen.serving.generation import Generator
from vargen.serving.image_requests import check_model, check_size, parse_number, parse_prompt, parse_seed, refuse
from vargen.serving.limits import RequestLimits
from vargen.serving.model_card import ModelCard
from vargen.serving.request_bodies import read_body
from vargen.serving.tasks import Event, GeneratedVideo, TaskFailed, TaskHandle, VideoFrames, VideoTask
from vargen.values import parse_float, short_repr

Events = asyncio.Queue[tuple[TaskHandle, Event]]


def add_video_routes(app: FastAPI, card: ModelCard, generator: Generator, limits: RequestLimits) -> None:
    """Add the endpoint."""

    @app.post("/v1/videos")
    async def generate(request: Request) -> Response:
        task = parse_video_task(await read_body(request, limits), card, limits)
        events, loop = Events(), asyncio.get_running_loop()
        [handle] = generator.submit([task], lambda *event: loop.call_soon_threadsafe(events.put_nowait, event))
        try:  # an error before the first frame has a status of its own
            first = await run_while_connected(request.receive, _next_frames(events), limits.seconds)
        except BaseException:
            handle.cancel()
            raise
        response = StreamedBody(_encode(first, events, card), "video/mp4", limits.seconds, handle.cancel)
        response.headers["X-Seed"] = str(task.seed)
        return response


def parse_video_task(body: Mapping[str, Any], card: ModelCard, limits: RequestLimits) -> VideoTask:
    """Check a body and return the task. `seconds` and `seed` may be text, as in forms; unknown fields are ignored.

    Raises:
        APIError: for an invalid field, with its name, its value and what is allowed.
    """
    check_model(body, card)
    prompt = parse_prompt(body, limits)
    check_size(body, card)
    numbers = {name: _parse_text(body[name]) for name in ("seconds", "seed", "num_blocks") if name in body}
    blocks = parse_number(numbers, "num_blocks", card.num_blocks, 1, limits.blocks)
    if numbers.get("seconds") is not None:
        seconds, longest = parse_float(numbers["seconds"]), limits.blocks * card.block_frames / card.fps
        if seconds is None or not 0 < seconds <= longest:
            raise refuse("seconds", f"seconds must be over 0 and at most {longest:g}, got {short_repr(body['seconds'])}.")
        blocks = math.ceil(seconds * card.fps / card.block_frames)
    return VideoTask(prompt, parse_seed(numbers, 1), blocks)


def _parse_text(value: Any) -> Any:
    """Return the number that a text holds, or the value itself."""
    if not isinstance(value, str) or len(value) > 20:
        return value
    try:
        return int(value) if value.isdecimal() else float(value)
    except ValueError:
        return value


async def _next_frames(events: Events) -> VideoFrames | None:
    """Return the next frames; None at the end. Raises the error of the task."""
    while True:
        _, event = await events.get()
        if isinstance(event, TaskFailed):
            raise to_api_error(event.error)
        if isinstance(event, VideoFrames):
            return event
        if isinstance(event, GeneratedVideo):
            return None


async def _encode(frames: VideoFrames | None, events: Events, card: ModelCard) -> AsyncGenerator[bytes, None]:
    """Yield the MP4, a chunk for each block. After an error it ends early."""
    file = _Chunks()
    writer = Mp4Writer(file, card.size, card.fps, live=True)
    while frames is not None:
        await asyncio.to_thread(_add_frames, writer, frames)
        yield file.take()
        frames = await _next_frames(events)
    writer.close()
    yield file.take()


def _add_frames(writer: Mp4Writer, frames: VideoFrames) -> None:
    for frame in frames.frames:
        writer.add(frame)


class _Chunks:
    """A file that keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, content: bytes) -> int:
        self._parts.append(bytes(content))
        return len(content)

    def take(self) -> bytes:
        """Return what was written since the last call."""
        content, self._parts = b"".join(self._parts), []
        return content

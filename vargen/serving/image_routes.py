"""`POST /v1/images/generations`: images at once, or partial and final images as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image

from vargen.reading import on_white
from vargen.serving.connections import StreamedBody, run_while_connected
from vargen.serving.errors import APIError, to_api_error
from vargen.serving.generation import Generator
from vargen.serving.image_requests import FORMATS, ImageGeneration, parse_image_generation
from vargen.serving.limits import RequestLimits
from vargen.serving.links import ImageLinks
from vargen.serving.model_card import ModelCard
from vargen.serving.request_bodies import read_body
from vargen.serving.tasks import Event, GeneratedImage, PartialImage, TaskFailed, TaskHandle

SEND_SECONDS = 10.0  # a stream may take longer than a request, so that a client learns why it ends

Events = asyncio.Queue[tuple[TaskHandle, Event]]


def add_image_routes(app: FastAPI, card: ModelCard, generator: Generator, limits: RequestLimits) -> None:
    """Add the endpoint and the addresses of its images."""
    links = ImageLinks()

    @app.post("/v1/images/generations")
    async def generate(request: Request) -> Response:
        generation = parse_image_generation(await read_body(request, limits), card, limits)
        events, loop = Events(), asyncio.get_running_loop()
        handles = generator.submit(
            generation.tasks, lambda *event: loop.call_soon_threadsafe(events.put_nowait, event)
        )  # fmt: skip

        def cancel() -> None:
            for handle in handles:
                handle.cancel()

        if generation.stream:
            chunks = _stream(generation, handles, events, card, limits.seconds)
            return StreamedBody(chunks, "text/event-stream", limits.seconds + SEND_SECONDS, cancel)
        try:
            work = _collect(generation, handles, events)
            images = await run_while_connected(request.receive, work, limits.seconds)
        finally:
            cancel()
        data: list[dict[str, Any]] = []
        for handle, content in zip(handles, images, strict=True):
            if generation.response_format == "url":
                name = links.add(content, FORMATS[generation.output_format])
                item = {"url": str(request.base_url.replace(path=f"/images/{name}"))}
            else:
                item = {"b64_json": base64.b64encode(content).decode()}
            data.append({**item, "seed": handle.task.seed})
        return JSONResponse({**_describe(generation, card), "created": int(time.time()), "data": data})

    @app.get("/images/{name}")
    async def show(name: str) -> Response:
        found = links.find(name)
        if found is None:
            raise APIError(404, "There is no such image, or no longer.", code="not_found")
        return Response(found[0], media_type=found[1], headers={"Cache-Control": "private, max-age=3600"})


async def _collect(generation: ImageGeneration, handles: list[TaskHandle], events: Events) -> list[bytes]:
    """Return the encoded images in the order of the tasks. Raises the error of the first one that fails."""
    images: dict[TaskHandle, bytes] = {}
    while len(images) < len(handles):
        handle, event = await events.get()
        if isinstance(event, TaskFailed):
            raise to_api_error(event.error)
        if isinstance(event, GeneratedImage):
            images[handle] = await asyncio.to_thread(encode_image, event.image, generation.output_format)
    return [images[handle] for handle in handles]


async def _stream(
    generation: ImageGeneration, handles: list[TaskHandle], events: Events, card: ModelCard, seconds: float
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events: partial images, the final ones, or an error, which is the last one."""
    deadline, left = time.monotonic() + seconds, len(handles)
    common = _describe(generation, card)
    while left:
        try:
            async with asyncio.timeout(
                max(0.0, deadline - time.monotonic())
            ):  # before 3.12, wait_for may swallow a cancellation
                handle, event = await events.get()
            if isinstance(event, TaskFailed):
                raise event.error
        except Exception as error:
            yield format_event("error", to_api_error(error).body)
            return
        if isinstance(event, PartialImage | GeneratedImage):
            content = await asyncio.to_thread(encode_image, event.image, generation.output_format)
            whole = isinstance(event, GeneratedImage)
            name = f"image_generation.{'completed' if whole else 'partial_image'}"
            place = {} if isinstance(event, GeneratedImage) else {"partial_image_index": event.index}
            data = {"type": name, "b64_json": base64.b64encode(content).decode(), "created_at": int(time.time()), **common}
            yield format_event(name, {**data, **place, "image_index": handles.index(handle), "seed": handle.task.seed})
            left -= whole


def _describe(generation: ImageGeneration, card: ModelCard) -> dict[str, str]:
    return {"background": "opaque", "output_format": generation.output_format, "quality": "auto", "size": card.size_name}


def format_event(name: str, data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def encode_image(image: Image.Image, output_format: str) -> bytes:
    """Encode an image as a file. Parts that are not generated yet are transparent or, in JPEG, white."""
    file = io.BytesIO()
    if output_format == "jpeg":
        on_white(image).save(file, "JPEG", quality=95)
    else:
        image.save(file, output_format.upper(), **({"lossless": True} if output_format == "webp" else {}))
    return file.getvalue()

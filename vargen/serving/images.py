"""`POST /v1/images/generations` and `/v1/images/edits`, at once or as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Form, Request, UploadFile
from fastapi.responses import JSONResponse, Response
from PIL import Image
from pydantic import Field

from vargen.decoding import Sampling
from vargen.reading import on_white, open_image
from vargen.serving.api import Body, Job, ModelCard, RequestLimits, StreamedBody, keep
from vargen.serving.engine import GenerationThread
from vargen.serving.errors import APIError, refuse, to_api_error
from vargen.serving.tasks import Generated, ImageTask, PartialImage
from vargen.values import short_repr

SEND_SECONDS = 10.0  # a stream may take longer than a request, so that a client learns why it ends


class ImageBody(Body):
    """Body of a request for images; fields of OpenAI without a meaning here have no effect."""

    n: Annotated[int, Field(ge=1)] | None = None
    background: Literal["auto", "opaque"] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=16)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=1000)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    quality: Any = None
    style: Any = None
    user: Any = None
    moderation: Any = None
    output_compression: Any = None


class EditBody(ImageBody, strict=False):
    """Form of a request to inpaint the transparent area of `mask`, or of the image itself."""

    image: UploadFile
    mask: UploadFile | None = None
    input_fidelity: Any = None


def add_image_routes(app: FastAPI, card: ModelCard, generation: GenerationThread, limits: RequestLimits) -> tuple[str, ...]:
    """Add the endpoints and the addresses of images; returns the paths of the endpoints."""
    links: dict[str, tuple[bytes, str]] = {}

    async def answer(body: ImageBody, request: Request, edit: Mapping[str, Image.Image] | None = None) -> Response:
        tasks, kind = make_tasks(body, card, limits, edit or {}), body.output_format or "png"
        about = {"background": "opaque", "output_format": kind, "quality": "auto", "size": card.size_name}
        job = Job(generation, tasks, limits.seconds, request.receive)
        if body.stream:
            chunks = _stream(job, {"created_at": int(time.time()), **about})
            return StreamedBody(chunks, "text/event-stream", limits.seconds + SEND_SECONDS)
        images: dict[int, bytes] = {}
        async for number, event in job:
            if isinstance(event, Generated):
                images[number] = await asyncio.to_thread(encode_image, event.image, kind)
        data = []
        for number, task in enumerate(tasks):
            content = images[number]
            if body.response_format == "url":
                name = keep(links, (content, f"image/{kind}"), lambda file: len(file[0]))
                place = {"url": str(request.base_url.replace(path=f"/images/{name}"))}
            else:
                place = {"b64_json": base64.b64encode(content).decode()}
            data.append({**place, "seed": task.seed})
        return JSONResponse({**about, "created": int(time.time()), "data": data})

    @app.api_route("/images/{name}", methods=["GET", "HEAD"])
    async def show(name: str) -> Response:
        if (found := links.get(name)) is None:
            raise APIError(404, "There is no such image, or no longer.", "not_found")
        return Response(found[0], media_type=found[1], headers={"Cache-Control": "private, max-age=3600"})

    @app.post("/v1/images/generations")
    async def generate(body: ImageBody, request: Request) -> Response:
        return await answer(body, request)

    if not card.edits_images:
        return ("/v1/images/generations",)

    @app.post("/v1/images/edits")
    async def edit(body: Annotated[EditBody, Form()], request: Request) -> Response:
        image = await asyncio.to_thread(_read_upload, body.image, "image", card)
        mask = image if body.mask is None else await asyncio.to_thread(_read_upload, body.mask, "mask", card)
        return await answer(body, request, {"image": on_white(image), "mask_image": mask})

    return "/v1/images/generations", "/v1/images/edits"


def make_tasks(body: ImageBody, card: ModelCard, limits: RequestLimits, edit: Mapping[str, Image.Image]) -> list[ImageTask]:
    """Return the tasks of a request, one per image, with consecutive seeds."""
    count = body.n or 1
    if count > limits.images:
        raise refuse("n", f"must be at most {limits.images}, got {short_repr(count)}")
    seed = body.check(card, count)
    subject = _find_class(body.prompt, card) if card.num_classes else body.prompt
    if body.stream and body.response_format == "url":
        raise refuse("response_format", "must be 'b64_json' with stream")
    if body.partial_images and not body.stream:
        raise refuse("partial_images", "needs stream: true")
    if (body.top_k or 0) > card.vocab_size:
        raise refuse("top_k", f"must be at most {card.vocab_size}, the number of tokens, got {short_repr(body.top_k)}")
    given = body.model_dump(include={"temperature", "top_k", "top_p", "min_p"}, exclude_none=True)
    values = {**card.defaults, **given}
    sampling, partial = Sampling(**values), body.partial_images or 0
    return [ImageTask(subject, seed + k, sampling, partial, body.guidance_scale, edit) for k in range(count)]


def _find_class(prompt: str, card: ModelCard) -> int:
    """Return the number of the class that a prompt names."""
    word = prompt.strip().lower()
    number = int(word) if word.isdecimal() and len(word) < 10 else card.class_names.get(word)
    if number is None or number >= card.num_classes:
        allowed = f"the number of a class, 0 to {card.num_classes - 1}" + (", or its name" if card.class_names else "")
        raise refuse("prompt", f"must be {allowed}, got {short_repr(prompt)}")
    return number


def _read_upload(file: UploadFile, name: str, card: ModelCard) -> Image.Image:
    """Return an uploaded image. Raises APIError if it is none, or of another size."""
    try:
        with open_image(file.file, name) as image:
            if image.size == card.size:
                copy: Any = image.copy()
                copy.filename = file.filename  # for warnings
                return copy
    except (ValueError, OSError) as error:
        raise APIError(400, f"{error}.", "invalid_image", name) from None
    raise refuse(name, f"must be {card.size_name} pixels, the size of this model")


async def _stream(job: Job, about: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events: partial images, the final ones, or an error, which is the last one."""
    try:
        async for number, event in job:
            if isinstance(event, PartialImage | Generated):
                name, place = "image_generation.completed", {}
                if isinstance(event, PartialImage):
                    name, place = "image_generation.partial_image", {"partial_image_index": event.index}
                file = await asyncio.to_thread(encode_image, event.image, about["output_format"])
                content = base64.b64encode(file).decode()
                place |= {"image_index": number, "seed": job.handles[number].task.seed}
                yield format_event(name, {"type": name, "b64_json": content, **about, **place})
    except Exception as error:
        yield format_event("error", to_api_error(error).body)


def format_event(name: str, data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def encode_image(image: Image.Image, kind: str) -> bytes:
    """Encode an image; parts that are not generated yet are transparent or, in JPEG, white."""
    file = io.BytesIO()
    if kind == "jpeg":
        on_white(image).save(file, "JPEG", quality=95)
    else:
        image.save(file, kind.upper(), **({"lossless": True} if kind == "webp" else {}))
    return file.getvalue()

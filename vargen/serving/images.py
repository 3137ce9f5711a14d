"""`POST /v1/images/generations` and `/v1/images/edits`: images at once, or as server-sent events while they are generated."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Form, Request, UploadFile
from fastapi.responses import JSONResponse, Response
from PIL import Image
from pydantic import Field

from vargen.decoding import Sampling
from vargen.reading import on_white, open_image
from vargen.serving.engine import Generator
from vargen.serving.errors import APIError, Body, refuse, to_api_error
from vargen.serving.model_card import ModelCard, RequestLimits
from vargen.serving.requests import Job, KeptFiles, StreamedBody, check_model, check_prompt, choose_seed, run_while_connected
from vargen.serving.tasks import Edit, GeneratedImage, ImageTask, PartialImage
from vargen.values import OPTIONS, parse_int, short_repr

SEND_SECONDS = 10.0  # a stream may take longer than a request, so that a client learns why it ends
_MAX_PARTIAL_IMAGES = 16  # OpenAI's clients ask for at most 3
_SAMPLING = ("temperature", "top_k", "top_p")


class ImageBody(Body):
    """Body of a request for images. Fields of OpenAI without a meaning here are taken and have no effect; `seed` and those of
    sampling are additions."""

    prompt: str
    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    size: str | None = None
    background: Literal["auto", "opaque"] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=_MAX_PARTIAL_IMAGES)] | None = None
    seed: int | None = None
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    quality: Any = None
    style: Any = None
    user: Any = None
    moderation: Any = None
    output_compression: Any = None


class EditBody(ImageBody, strict=False):
    """Form of a request to inpaint: the transparent area of `mask`, or of the image itself, is generated."""

    image: UploadFile
    mask: UploadFile | None = None
    input_fidelity: Any = None


def add_image_routes(app: FastAPI, card: ModelCard, generator: Generator, limits: RequestLimits) -> tuple[str, ...]:
    """Add the endpoints and the addresses of images; returns the paths of the endpoints."""
    links = KeptFiles[tuple[bytes, str]](lambda file: len(file[0]), limits.kept_bytes)

    async def answer(body: ImageBody, request: Request, edit: Edit | None = None) -> Response:
        tasks, kind = make_tasks(body, card, limits, edit), body.output_format or "png"
        job = Job(generator, tasks, limits.seconds)
        about = {"background": "opaque", "output_format": kind, "quality": "auto", "size": card.size_name}
        if body.stream:
            chunks = _stream(job, tasks, {"created_at": int(time.time()), **about})
            return StreamedBody(chunks, "text/event-stream", limits.seconds + SEND_SECONDS, job.cancel)
        images = await run_while_connected(request.receive, _collect(job, kind))
        data = []
        for task, content in zip(tasks, images, strict=True):
            if body.response_format == "url":
                name = links.keep((content, f"image/{kind}"))
                place = {"url": str(request.base_url.replace(path=f"/images/{name}"))}
            else:
                place = {"b64_json": base64.b64encode(content).decode()}
            data.append({**place, "seed": task.seed})
        return JSONResponse({**about, "created": int(time.time()), "data": data})

    @app.post("/v1/images/generations")
    async def generate(body: ImageBody, request: Request) -> Response:
        return await answer(body, request)

    @app.api_route("/images/{name}", methods=["GET", "HEAD"])
    async def show(name: str) -> Response:
        if (found := links.get(name)) is None:
            raise APIError(404, "There is no such image, or no longer.", code="not_found")
        return Response(found[0], media_type=found[1], headers={"Cache-Control": "private, max-age=3600"})

    if not card.edits_images:
        return ("/v1/images/generations",)

    @app.post("/v1/images/edits")
    async def edit(body: Annotated[EditBody, Form()], request: Request) -> Response:
        image = await asyncio.to_thread(_read_upload, body.image, "image")
        mask = image if body.mask is None else await asyncio.to_thread(_read_upload, body.mask, "mask")
        for name, each in (("image", image), ("mask", mask)):
            if each.size != card.size:
                width, height = each.size
                raise refuse(name, f"must be {card.size_name} pixels, the size of this model, got {width}x{height}")
        return await answer(body, request, Edit(on_white(image), mask))

    return "/v1/images/generations", "/v1/images/edits"


def make_tasks(body: ImageBody, card: ModelCard, limits: RequestLimits, edit: Edit | None = None) -> list[ImageTask]:
    """Return the tasks of a request, one per image, with consecutive seeds.

    Raises:
        APIError: for an invalid field, with its name, its value and what is allowed.
    """
    check_model(body.model, body.size, card)
    subject, count = _find_subject(check_prompt(body.prompt, limits), card), body.n or 1
    if count > limits.images:
        raise refuse("n", f"must be at most {limits.images}, got {count}")
    if body.stream and body.response_format == "url":
        raise refuse("response_format", "must be 'b64_json' with stream")
    if body.partial_images and not body.stream:
        raise refuse("partial_images", "needs stream: true")
    values = {name: card.defaults[name] for name in _SAMPLING}
    for name in ("guidance_scale", *_SAMPLING):
        if (value := getattr(body, name)) is None:
            continue
        try:
            OPTIONS[name].range.check(name, value)
            values[name] = value
            if name == "top_k":
                Sampling(top_k=value).validate_top_k(card.vocab_size)
        except (ValueError, TypeError) as error:
            raise APIError(400, f"{error}.", param=name, code="invalid_value") from None
    scale = values.pop("guidance_scale", None)
    sampling, seed = Sampling(**values), choose_seed(body.seed, count)
    return [ImageTask(subject, seed + k, sampling, body.partial_images or 0, scale, edit) for k in range(count)]


def _find_subject(prompt: str, card: ModelCard) -> str | int:
    """Return the prompt, or the number of the class that it names."""
    if not card.num_classes:
        return prompt
    word = prompt.strip().lower()
    is_number = word.isdecimal() and len(word) < 10
    number = parse_int(int(word), 0, card.num_classes - 1) if is_number else card.class_names.get(word)
    if number is None:
        allowed = f"the number of a class, 0 to {card.num_classes - 1}" + (", or its name" if card.class_names else "")
        raise refuse("prompt", f"must be {allowed}, got {short_repr(prompt)}")
    return number


def _read_upload(file: UploadFile, name: str) -> Image.Image:
    """Return an uploaded image. Raises APIError if it is none."""
    try:
        with open_image(file.file, name) as image:
            return image.copy()
    except (ValueError, OSError) as error:
        raise APIError(400, f"{error}.", param=name, code="invalid_image") from None


async def _collect(job: Job, kind: str) -> list[bytes]:
    """Return the encoded images in the order of the tasks."""
    images: dict[int, bytes] = {}
    async for number, event in job:
        if isinstance(event, GeneratedImage):
            images[number] = await asyncio.to_thread(encode_image, event.image, kind)
    return [images[number] for number in sorted(images)]


async def _stream(job: Job, tasks: list[ImageTask], about: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events: partial images, the final ones, or an error, which is the last one."""
    try:
        async for number, event in job:
            if isinstance(event, PartialImage | GeneratedImage):
                content = await asyncio.to_thread(encode_image, event.image, about["output_format"])
                name = f"image_generation.{'partial_image' if isinstance(event, PartialImage) else 'completed'}"
                place = {"partial_image_index": event.index} if isinstance(event, PartialImage) else {}
                data = {"type": name, "b64_json": base64.b64encode(content).decode(), **about, **place}
                yield format_event(name, {**data, "image_index": number, "seed": tasks[number].seed})
    except Exception as error:
        yield format_event("error", to_api_error(error).body)


def format_event(name: str, data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def encode_image(image: Image.Image, kind: str) -> bytes:
    """Encode an image as a file. Parts that are not generated yet are transparent or, in JPEG, white."""
    file = io.BytesIO()
    if kind == "jpeg":
        on_white(image).save(file, "JPEG", quality=95)
    else:
        image.save(file, kind.upper(), **({"lossless": True} if kind == "webp" else {}))
    return file.getvalue()

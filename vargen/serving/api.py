"""The HTTP interface of one model, as OpenAI's. Nothing about the machine leaves it: details go to the log."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vargen import __version__
from vargen.pipelines import validation
from vargen.serving.engine import GenerationThread
from vargen.serving.errors import APIError, ClientGoneError, add_error_handlers, refuse
from vargen.serving.tasks import Generated, TaskHandle
from vargen.values import MAX_SEED, short_repr

KEPT_BYTES = 64 * 2**20  # of images with an address, or of videos, in memory
_BODY_BYTES, _UPLOAD_BYTES = 64 * 1024, 8 * 2**20  # of a body without and with images
_CLOSE = {"Connection": "close"}  # because the body is not read, or not to its end
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_OTHER_MODELS = {  # what a model may be unable to do, and one that can
    "/v1/images/generations": ("generate images", "emoji"),
    "/v1/images/edits": ("edit images", "emoji-var"),
    "/v1/videos": ("generate videos", "emoji-video"),
}
_T = TypeVar("_T")


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request; a larger one is refused before anything is generated.

    Attributes:
        images: number of images `n`.
        seconds: from the first byte of the body to the last one of the answer.
        blocks: length of a video in blocks.
        connections: number of requests at a time; twice as many connections may be open.
        connections_per_address: of one client, or of a proxy.
        header_seconds: until the header of a request is complete.
    """

    images: int = 10
    seconds: float = 120.0
    blocks: int = 64
    connections: int = 512
    connections_per_address: int = 256
    header_seconds: float = 10.0


@dataclass(frozen=True)
class ModelCard:
    """What the interface knows of a model, without its networks.

    Attributes:
        name: by which clients name it.
        size: width and height of its images in pixels.
        vocab_size: of its tokens; 0 for video.
        num_classes: 0 for models that read prompts.
        class_names: number of each class by its names, in lower case.
        defaults: temperature, top-k and top-p by name.
        edits_images: whether it inpaints.
        fps: frames per second; 0 for images.
        block_frames: of the first block of a video, and of the others.
        num_blocks: of a video by default.
    """

    name: str
    size: tuple[int, int]
    vocab_size: int = 0
    num_classes: int = 0
    class_names: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    edits_images: bool = False
    fps: int = 0
    block_frames: tuple[int, int] = (0, 0)
    num_blocks: int = 0

    @property
    def size_name(self) -> str:
        """The size as OpenAI's clients write it."""
        return f"{self.size[0]}x{self.size[1]}"


class Body(BaseModel, strict=True, extra="forbid"):
    """What bodies have in common. A field that they do not have is refused by name."""

    prompt: Annotated[str, Field(max_length=4000)]
    model: str | None = None
    size: str | None = None
    seed: int | None = None

    def check(self, card: ModelCard, count: int = 1) -> int:
        """Return the seed of the first of `count` images; a random one for None and -1.

        Raises:
            APIError: for another model, another size than that of its images, a seed out of range, or no prompt.
        """
        if self.model not in (None, card.name):
            message = f"The model {short_repr(self.model)} does not exist; this server has {card.name!r}."
            raise APIError(404, message, "model_not_found", "model")
        if self.size not in (None, "auto", card.size_name):
            raise refuse("size", f"must be {card.size_name!r}, the only one of this model, got {short_repr(self.size)}")
        try:
            validation.validate_prompts(self.prompt)
        except ValueError as error:
            raise refuse("prompt", str(error).replace("prompt[0]", "prompt").removeprefix("prompt ")) from None
        if self.seed in (None, -1):
            return secrets.randbelow(2**32)
        if not 0 <= self.seed <= MAX_SEED - count + 1:
            allowed = f"from 0 to {MAX_SEED - count + 1}, or -1 for a random one"
            raise refuse("seed", f"must be {allowed}, got {short_repr(self.seed)}")
        return self.seed


class Job:
    """The tasks of a request, as an iterator over their events, `(number of the task, event)`, until all have ended.

    It raises TimeoutError, and ClientGoneError if `receive` tells that the client went away.
    """

    def __init__(self, generation: GenerationThread, tasks: Sequence[Any], seconds: float, receive: Receive | None = None):
        self._events, loop = asyncio.Queue[tuple[TaskHandle, Any]](), asyncio.get_running_loop()
        self._deadline = loop.time() + seconds
        self.handles = generation.submit(tasks, lambda *event: loop.call_soon_threadsafe(self._events.put_nowait, event))
        self._watcher = None if receive is None else asyncio.create_task(self._watch(receive))

    async def __aiter__(self) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield events; raises the error of the first task that fails, and cancels the others."""
        left = len(self.handles)
        try:
            while left:
                async with asyncio.timeout_at(self._deadline):
                    handle, event = await self._events.get()
                if isinstance(event, BaseException):
                    raise event
                left -= isinstance(event, Generated)
                yield self.handles.index(handle), event
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel what has not ended."""
        if self._watcher is not None:
            self._watcher.cancel()
        for handle in self.handles:
            handle.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait((self.handles[0], ClientGoneError()))
        self.cancel()


class StreamedBody(StreamingResponse):
    """A body that is sent while it is made. After `seconds`, the connection is closed, also if nobody reads."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str, seconds: float):
        super().__init__(chunks, media_type=media_type, headers={"Cache-Control": "no-store"})
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(TimeoutError, OSError, HTTPException):
            async with asyncio.timeout(self.seconds):
                await super().__call__(scope, receive, send)


def keep(files: dict[str, _T], file: _T, size_of: Callable[[_T], int]) -> str:
    """Keep a file in memory by an unguessable name, which is returned, and drop the oldest ones beyond `KEPT_BYTES`.

    `size_of` returns the bytes of a file; 0 for one that is not finished, and stays.
    """
    name, left = secrets.token_urlsafe(24), KEPT_BYTES
    files[name] = file
    for key in reversed(list(files)):
        size = size_of(files[key])
        left -= size
        if left < 0 and size and key != name:
            del files[key]
    return name


def build_app(
    card: ModelCard,
    generation: GenerationThread,
    limits: RequestLimits | None = None,
    api_key: str | None = None,
    allow_origins: Sequence[str] = (),
) -> FastAPI:
    """Build the application of one model, which does not close the thread that generates.

    Clients must send the key, if there is one. Scripts of the sites in `allow_origins` may use the service; `*`: of any.
    """
    from vargen.serving.images import add_image_routes
    from vargen.serving.videos import add_video_routes

    limits, registry = limits or RequestLimits(), CollectorRegistry()
    app = FastAPI(title="vargen", docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    add_routes = add_video_routes if card.fps else add_image_routes
    paths = "/health", "/metrics", "/v1/models", *add_routes(app, card, generation, limits)
    model = {"id": card.name, "object": "model", "created": int(time.time()), "owned_by": "vargen"}

    @app.api_route("/", methods=["GET", "HEAD"])
    async def about() -> dict[str, Any]:
        return {"service": "vargen", "version": __version__, "model": card.name, "endpoints": paths}

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        alive = generation.stats.alive
        return JSONResponse({"status": "ok" if alive else "shutting down"}, 200 if alive else 503)

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
    async def find_model(name: str) -> dict[str, Any]:
        if name != card.name:
            raise APIError(404, f"The model {short_repr(name)} does not exist.", "model_not_found", "model")
        return model

    async def refuse_task(request: Request) -> None:
        task, other = _OTHER_MODELS[request.url.path]
        raise APIError(404, f"The model {card.name!r} cannot {task}; {other!r} can.", "not_found", "model")

    for path in _OTHER_MODELS.keys() - {*paths}:
        app.add_api_route(path, refuse_task, methods=["POST"])
    registry.register(_GenerationMetrics(generation))
    app.add_middleware(Gate, limits=limits, api_key=api_key, registry=registry, paths=paths, origins=allow_origins)
    if allow_origins:  # around the gate, because browsers ask first without a key
        app.add_middleware(CORSMiddleware, allow_origins=allow_origins, allow_methods=["*"], allow_headers=["*"])
    return app


class Gate:
    """What each request passes: its number at a time, its key, and the size and time of its body. It is counted, too."""

    def __init__(
        self,
        app: ASGIApp,
        limits: RequestLimits,
        api_key: str | None,
        origins: Sequence[str],
        registry: CollectorRegistry,
        paths: Sequence[str],
    ):
        self.app, self.limits, self.paths, self.origins, self._active = app, limits, paths, origins, 0
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._requests = Counter("vargen_requests", "Answered requests.", ["endpoint", "status"], registry=registry)
        self._seconds = Histogram(
            "vargen_request_seconds",
            "Seconds to the end of the answer.",
            ["endpoint"],
            registry=registry,
            buckets=_BUCKETS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 499  # for a client that goes away before the answer

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._active += 1
        try:
            if (error := self._find_error(scope)) is not None:
                await JSONResponse(error.body, error.status_code, error.headers)(scope, receive, watch)
            else:
                await self.app(scope, self._limit_body(scope["path"], receive), watch)
        finally:
            self._active -= 1
            endpoint = scope["path"] if scope["path"] in self.paths else "other"
            self._requests.labels(endpoint, str(status)).inc()
            self._seconds.labels(endpoint).observe(time.monotonic() - started)

    def _find_error(self, scope: Scope) -> APIError | None:
        if self._active > self.limits.connections:
            return APIError(503, "Too many requests at a time.", "overloaded", headers={"Retry-After": "1", **_CLOSE})
        fields = Headers(scope=scope)
        origin = fields.get("origin", "")
        if origin and origin.partition("://")[2] != fields.get("host") and not {"*", origin} & set(self.origins):
            message = "Pages of other sites may not use this service: see --allow-origin."
            return APIError(403, message, "origin_not_allowed", headers=_CLOSE)
        given = fields.get("authorization", "").encode("latin-1", "replace")
        is_open = self._expected is None or not scope["path"].startswith("/v1")
        if is_open or secrets.compare_digest(given, self._expected or b""):
            return None
        headers = {"WWW-Authenticate": "Bearer", **_CLOSE}
        return APIError(401, "The API key is missing or wrong.", "invalid_api_key", headers=headers)

    def _limit_body(self, path: str, receive: Receive) -> Receive:
        """Return what reads a body that has to arrive in time, and is bounded."""
        left = _UPLOAD_BYTES if path.endswith("/edits") else _BODY_BYTES
        deadline, is_read = asyncio.get_running_loop().time() + self.limits.seconds, False

        async def receive_limited() -> Message:
            nonlocal left, is_read
            if is_read:  # what follows tells that the client went away
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, headers=_CLOSE) from None
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, headers=_CLOSE)
            is_read = not message.get("more_body", False)
            return message

        return receive_limited


class _GenerationMetrics(Collector):
    def __init__(self, generation: GenerationThread):
        self.generation = generation

    def collect(self) -> Iterator[Metric]:
        stats = self.generation.stats
        rate = stats.tokens / max(stats.passes, 1)
        yield GaugeMetricFamily("vargen_queue_length", "Images or videos that wait.", stats.num_waiting)
        yield GaugeMetricFamily("vargen_active", "Images or videos in slots.", stats.num_active)
        yield GaugeMetricFamily("vargen_images_per_second", "In the last minute.", stats.images_per_second)
        yield GaugeMetricFamily("vargen_tokens_per_pass", "Tokens that a pass commits to an image.", rate)
        yield CounterMetricFamily("vargen_images", "Finished images.", stats.images)
        yield CounterMetricFamily("vargen_tokens", "Tokens of finished images.", stats.tokens)
        yield CounterMetricFamily("vargen_passes", "Passes of finished images, summed.", stats.passes)

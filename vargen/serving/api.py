"""The HTTP interface of one model, as OpenAI's: the application, who may use it, and what it reports about itself."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vargen import __version__
from vargen.serving.engine import Generator
from vargen.serving.errors import APIError, add_error_handlers
from vargen.serving.images import add_image_routes
from vargen.serving.model_card import ModelCard, RequestLimits
from vargen.serving.videos import add_video_routes
from vargen.values import short_repr

KEY_VARIABLE = "VARGEN_API_KEY"
_CLOSE = {"Connection": "close"}  # because the body is not read, or not to its end
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


def read_api_key(environment: Mapping[str, str]) -> str | None:
    """Return the key of the environment variable; None if it is not set."""
    key = environment.get(KEY_VARIABLE)
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{KEY_VARIABLE} must be printable ASCII characters without spaces, or not set")
    return key


def build_app(
    card: ModelCard,
    generator: Generator,
    limits: RequestLimits | None = None,
    api_key: str | None = None,
    allow_origins: Sequence[str] = (),
) -> FastAPI:
    """Build the application of one model. It does not close the generator.

    Args:
        card: describes the model.
        generator: generates its images or videos.
        limits: of one request.
        api_key: that clients must send; None lets everyone in.
        allow_origins: addresses of web pages whose scripts may use the service, such as `https://example.org`, or `*`.
    """
    limits, registry = limits or RequestLimits(), CollectorRegistry()
    app = FastAPI(title="vargen", docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    add_routes = add_video_routes if card.fps else add_image_routes
    paths = "/health", "/metrics", "/v1/models", *add_routes(app, card, generator, limits)

    @app.api_route("/", methods=["GET", "HEAD"])
    async def about() -> dict[str, Any]:
        return {"service": "vargen", "version": __version__, "model": card.name, "endpoints": paths}

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        alive = generator.stats.alive
        return JSONResponse({"status": "ok" if alive else "shutting down"}, 200 if alive else 503)

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card.document]}

    @app.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
    async def find_model(name: str) -> dict[str, Any]:
        if name != card.name:
            raise APIError(404, f"The model {short_repr(name)} does not exist.", param="model", code="model_not_found")
        return card.document

    registry.register(_GeneratorMetrics(generator))
    app.add_middleware(Gate, limits=limits, api_key=api_key, registry=registry, paths=paths, origins=allow_origins)
    if allow_origins:  # around the gate, because browsers ask first without a key
        app.add_middleware(CORSMiddleware, allow_origins=allow_origins, allow_methods=["*"], allow_headers=["*"])
    return app


class Gate:
    """What each request passes: the number of requests at a time, the key, the size and time of its body; and it is counted.

    Args:
        app: the application.
        limits: of requests.
        api_key: of the endpoints under /v1; None lets everyone in.
        registry: of the metrics.
        paths: that are counted by name; others are counted together.
        origins: addresses of pages whose scripts may use the service; a browser names that of the page.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: RequestLimits,
        api_key: str | None,
        registry: CollectorRegistry,
        paths: Sequence[str],
        origins: Sequence[str],
    ):
        self.app, self.limits, self.paths, self.origins, self._active = app, limits, paths, origins, 0
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._requests = Counter("vargen_requests", "Answered requests.", ["endpoint", "status"], registry=registry)
        self._seconds = Histogram(
            "vargen_request_seconds", "Seconds to the end of the answer.", ["endpoint"], buckets=_BUCKETS, registry=registry
        )  # fmt: skip

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
                await error.response(scope, receive, watch)
            else:
                await self.app(scope, self._limit_body(scope["path"], receive), watch)
        finally:
            self._active -= 1
            endpoint = scope["path"] if scope["path"] in self.paths else "other"
            self._requests.labels(endpoint, str(status)).inc()
            self._seconds.labels(endpoint).observe(time.monotonic() - started)

    def _find_error(self, scope: Scope) -> APIError | None:
        if self._active > self.limits.connections:
            headers = {"Retry-After": "1", **_CLOSE}
            return APIError(503, "Too many requests at a time.", code="overloaded", headers=headers)
        fields = Headers(scope=scope)
        origin = fields.get("origin", "")
        if origin and origin.partition("://")[2] != fields.get("host") and not {"*", origin} & set(self.origins):
            message = "Pages of other sites may not use this service: see --allow-origin."
            return APIError(403, message, code="origin_not_allowed", headers=_CLOSE)
        if self._expected is None or not scope["path"].startswith("/v1"):
            return None
        given = fields.get("authorization", "").encode("latin-1", "replace")
        if secrets.compare_digest(given, self._expected):
            return None
        headers = {"WWW-Authenticate": "Bearer", **_CLOSE}
        return APIError(401, "The API key is missing or wrong.", code="invalid_api_key", headers=headers)

    def _limit_body(self, path: str, receive: Receive) -> Receive:
        """Return what reads a body that has to arrive in time, and is bounded."""
        most = self.limits.upload_bytes if path.endswith("/edits") else self.limits.body_bytes
        deadline, size, is_read = time.monotonic() + self.limits.seconds, 0, False

        async def receive_limited() -> Message:
            nonlocal size, is_read
            if is_read:  # what follows tells that the client went away
                return await receive()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, headers=_CLOSE) from None
            size += len(message.get("body", b""))
            if size > most:
                raise HTTPException(413, headers=_CLOSE)
            is_read = not message.get("more_body", False)
            return message

        return receive_limited


class _GeneratorMetrics:
    """Reads the counts of what generates when they are asked for."""

    def __init__(self, generator: Generator):
        self.generator = generator

    def collect(self) -> Iterator[Metric]:
        stats = self.generator.stats
        yield GaugeMetricFamily("vargen_queue_length", "Images or videos that wait.", stats.num_waiting)
        yield GaugeMetricFamily("vargen_active", "Images or videos that are being generated.", stats.num_active)
        yield GaugeMetricFamily("vargen_images_per_second", "Images per second in the last minute.", stats.images_per_second)
        rate = stats.tokens / max(stats.passes, 1)
        yield GaugeMetricFamily("vargen_tokens_per_pass", "Tokens that a pass commits to an image.", rate)
        yield CounterMetricFamily("vargen_images", "Finished images.", stats.images)
        yield CounterMetricFamily("vargen_tokens", "Tokens of finished images.", stats.tokens)
        yield CounterMetricFamily("vargen_passes", "Passes that finished images took part in, summed.", stats.passes)

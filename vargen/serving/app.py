"""The application: endpoints of OpenAI's interface around what generates."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from vargen.serving.access import AccessMiddleware
from vargen.serving.connections import ClientGoneError
from vargen.serving.errors import APIError, add_error_handlers
from vargen.serving.generation import Generator
from vargen.serving.image_routes import add_image_routes
from vargen.serving.limits import RequestLimits
from vargen.serving.metrics import CONTENT_TYPE, Metrics, MetricsMiddleware
from vargen.serving.model_card import ModelCard
from vargen.serving.video_routes import add_video_routes
from vargen.values import short_repr

_ENDPOINTS = ("/v1/images/generations", "/v1/videos", "/v1/models", "/health", "/metrics")


def build_app(
    card: ModelCard,
    generator: Generator,
    limits: RequestLimits | None = None,
    api_key: str | None = None,
) -> FastAPI:
    """Build the application of one model. It does not close the generator.

    Args:
        card: describes the model.
        generator: generates its images or videos.
        limits: of one request.
        api_key: that clients must send; None lets everyone in.
    """
    limits = limits or RequestLimits()
    app = FastAPI(title="vargen", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(lambda: generator.stats, _ENDPOINTS)
    app.add_middleware(AccessMiddleware, api_key=api_key, max_requests=limits.connections)
    app.add_middleware(MetricsMiddleware, metrics=metrics)
    add_error_handlers(app)

    @app.exception_handler(ClientGoneError)
    async def client_gone(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # which nobody reads

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = generator.stats.alive
        return JSONResponse({"status": "ok" if alive else "shutting down"}, 200 if alive else 503)

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card.document]}

    @app.get("/v1/models/{name:path}")
    async def find_model(name: str) -> JSONResponse:
        if name != card.name:
            raise APIError(404, f"The model {short_repr(name)} does not exist.", param="model", code="model_not_found")
        return JSONResponse(card.document)

    if card.makes_video:
        add_video_routes(app, card, generator, limits)
    else:
        add_image_routes(app, card, generator, limits)
    return app

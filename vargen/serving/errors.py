"""Errors of the HTTP interface, in OpenAI's shape. Nothing about the machine leaves it: details go to the log."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from vargen.serving.tasks import QueueFullError, ServiceClosedError, TaskLostError

logger = logging.getLogger("vargen")

_PHRASES = {404: "There is no such endpoint.", 405: "This endpoint does not take this method."}


class APIError(Exception):
    """An error that a client sees.

    Args:
        status: HTTP status.
        message: for the user of the client.
        param: name of the field that caused it.
        code: short name of the error.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The error as a response."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def to_api_error(error: BaseException) -> APIError:
    """Return what a client is told about an exception of a task or of the server."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(error.retry_after)}
        return APIError(429, "Too many images wait. Try again later.", code="rate_limit_exceeded", headers=headers)
    if isinstance(error, ServiceClosedError):
        return APIError(503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": "5"})
    if isinstance(error, TimeoutError):
        return APIError(504, "The request took too long, and was cancelled.", code="timeout")
    if isinstance(error, TaskLostError):
        return APIError(503, "The process that generated the image ended. Try again.", code="replica_lost")
    logger.error("a request failed: %s: %s", type(error).__name__, error)
    return APIError(500, "The generation failed; the server's log has the reason.", code="generation_failed")


def add_error_handlers(app: FastAPI) -> None:
    """Answer all errors in OpenAI's shape."""

    async def known(_: Request, error: Exception) -> JSONResponse:
        return to_api_error(error).response

    async def unknown_place(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = _PHRASES.get(error.status_code, "The request is malformed.")
        headers = dict(error.headers) if error.headers else None
        return APIError(
            error.status_code, message, code="not_found" if error.status_code == 404 else None, headers=headers
        ).response

    app.add_exception_handler(APIError, known)
    app.add_exception_handler(HTTPException, unknown_place)
    app.add_exception_handler(Exception, known)

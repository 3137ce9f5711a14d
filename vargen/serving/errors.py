"""Errors that clients of the service see, in OpenAI's shape. What else went wrong goes to the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from vargen.serving.tasks import QueueFullError, ServiceClosedError, TaskLostError
from vargen.values import describe_invalid

logger = logging.getLogger("vargen")

_PHRASES = {
    404: ("There is no such endpoint.", "not_found"),
    405: ("This endpoint does not take this method.", None),
    408: ("The body did not arrive in time.", "timeout"),
    413: ("The body is too large.", "request_too_large"),
}


class APIError(HTTPException):
    """An error that a client sees; `code` is its name, and `param` the field that caused it."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None, headers: Any = None):
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status_code, kind)
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """The client closed the connection."""


_KNOWN: dict[type[BaseException], tuple[Any, ...]] = {
    ServiceClosedError: (503, "The server is shutting down.", "shutting_down", None, {"Retry-After": "5"}),
    TimeoutError: (504, "The request took too long, and was cancelled.", "timeout"),
    TaskLostError: (503, "The process that generated the image ended. Try again.", "replica_lost"),
    ClientGoneError: (499, "The client closed the connection."),  # which nobody reads
}


def refuse(param: str, message: str, code: str = "invalid_value") -> APIError:
    """Return the error for an invalid field; the message begins with the name of the field."""
    return APIError(400, f"{param} {message}.", code, param)


def to_api_error(error: BaseException) -> APIError:
    """Return what a client is told about an exception of a task or of the server."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        message, code = _PHRASES.get(error.status_code, ("The request is malformed.", None))
        return APIError(error.status_code, message, code, headers=error.headers)
    if isinstance(error, RequestValidationError | ValidationError):
        return _describe_invalid_body(error.errors()[0])
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(error.retry_after)}
        return APIError(429, "Too many images wait. Try again later.", "rate_limit_exceeded", headers=wait)
    if type(error) in _KNOWN:
        return APIError(*_KNOWN[type(error)])
    logger.error("a request failed: %s: %s", type(error).__name__, error)
    return APIError(500, "The generation failed; the server's log has the reason.", "generation_failed")


def _describe_invalid_body(found: Mapping[str, Any]) -> APIError:
    """Return the error for a field that is not as its model says."""
    place = [
        ascii(part)[1:-1] if isinstance(part, str) else str(part) for part in found["loc"] if part not in ("body", "query")
    ]
    if found["type"] == "json_invalid" or not place:
        return APIError(400, "The body must be a JSON object in UTF-8.", "invalid_json")
    name = place[0][:80]
    if found["type"] == "missing":
        return refuse(name, "is missing", "missing_required_parameter")
    if found["type"] == "extra_forbidden":
        return refuse(name, "is no field of this request", "unknown_parameter")
    return refuse(name, describe_invalid(found))


def add_error_handlers(app: FastAPI) -> None:
    """Answer all errors in OpenAI's shape; those that are named here are no errors of the server."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        found = to_api_error(error)
        return JSONResponse(found.body, found.status_code, found.headers)

    for kind in (*_KNOWN, QueueFullError, HTTPException, RequestValidationError, ValidationError, Exception):
        app.add_exception_handler(kind, answer)

"""Errors of the HTTP interface, in OpenAI's shape. Nothing about the machine leaves it: details go to the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError, model_validator
from starlette.exceptions import HTTPException

from vargen.serving.tasks import QueueFullError, ServiceClosedError, TaskLostError
from vargen.values import short_repr, suggest_names

logger = logging.getLogger("vargen")

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_PHRASES = {
    404: ("There is no such endpoint.", "not_found"),
    405: ("This endpoint does not take this method.", None),
    408: ("The body did not arrive in time.", "timeout"),
    413: ("The body is too large.", "request_too_large"),
}


class ClientGoneError(Exception):
    """The client closed the connection."""


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
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The error as a response."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def refuse(param: str, message: str, code: str = "invalid_value") -> APIError:
    """Return the error for an invalid field; the message begins with the name of the field."""
    return APIError(400, f"{param} {message}.", param=param, code=code)


def to_api_error(error: BaseException) -> APIError:
    """Return what a client is told about an exception of a task or of the server."""
    match error:
        case APIError():
            return error
        case HTTPException():
            message, code = _PHRASES.get(error.status_code, ("The request is malformed.", None))
            return APIError(error.status_code, message, code=code, headers=error.headers)
        case RequestValidationError() | ValidationError():
            return _describe_invalid_body(error)
        case QueueFullError():
            headers = {"Retry-After": str(error.retry_after)}
            return APIError(429, "Too many images wait. Try again later.", code="rate_limit_exceeded", headers=headers)
        case ServiceClosedError():
            return APIError(503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": "5"})
        case TimeoutError():
            return APIError(504, "The request took too long, and was cancelled.", code="timeout")
        case TaskLostError():
            return APIError(503, "The process that generated the image ended. Try again.", code="replica_lost")
        case ClientGoneError():
            return APIError(499, "The client closed the connection.")  # which nobody reads
    logger.error("a request failed: %s: %s", type(error).__name__, error)
    return APIError(500, "The generation failed; the server's log has the reason.", code="generation_failed")


def _describe_invalid_body(error: RequestValidationError | ValidationError) -> APIError:
    """Return the error for the first field that is not as its model says."""
    found = error.errors()[0]
    place = [str(part) for part in found["loc"] if part != "body"]
    if found["type"] == "json_invalid" or not place:
        return APIError(400, "The body must be a JSON object in UTF-8.", code="invalid_json")
    name, message, value = place[0], found["msg"].removeprefix("Value error, "), found.get("input")
    if found["type"] == "missing":
        return refuse(name, "is missing", "missing_required_parameter")
    return refuse(name, f"is not valid: {message[0].lower()}{message[1:]}, got {short_repr(value)}")


class Body(BaseModel, strict=True):
    """Base class of bodies. A field that they do not have is refused by name."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, fields: Any) -> Any:
        for name in fields if isinstance(fields, Mapping) else ():
            if name not in cls.model_fields:
                hint = suggest_names(str(name), cls.model_fields)
                message = f"{short_repr(name)} is no field of this request; {hint}"
                raise APIError(400, message, param=str(name)[:80], code="unknown_parameter")
        return fields


def add_error_handlers(app: FastAPI) -> None:
    """Answer all errors in OpenAI's shape.

    Those of a type that is named here are answered where requests are routed, so that the server neither logs nor counts them
    as its own.
    """

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return to_api_error(error).response

    own = APIError, QueueFullError, ServiceClosedError, TaskLostError, TimeoutError, ClientGoneError
    for kind in (*own, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)

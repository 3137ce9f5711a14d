"""Reading the body of a request: bounded, within time, and JSON or a form of text fields."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from vargen.serving.connections import ClientGoneError
from vargen.serving.errors import APIError
from vargen.serving.limits import RequestLimits
from vargen.values import short_repr

_FORM = "multipart/form-data"
_CLOSE = {"Connection": "close"}  # because the rest of the body is not read


async def read_body(request: Request, limits: RequestLimits) -> dict[str, Any]:
    """Return the fields of a JSON object or of a form.

    Raises:
        APIError: for a body that is too large or too slow, of another type, or not an object.
        ClientGoneError: if the client closed the connection.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", _FORM):  # a page of another site cannot send these without asking first
        raise APIError(415, "Content-Type must be application/json.", code="unsupported_media_type", headers=_CLOSE)
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limits.body_bytes:
                    message = f"The body must have at most {limits.body_bytes} bytes."
                    raise APIError(413, message, code="request_too_large", headers=_CLOSE)
    except TimeoutError:
        raise APIError(408, "The body did not arrive in time.", code="timeout", headers=_CLOSE) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    content = b"".join(parts)
    return await _parse_form(request, content) if kind == _FORM else _parse_json(content)


def _parse_json(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise APIError(400, "The body must be JSON in UTF-8.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise APIError(400, f"The body must be a JSON object, got {short_repr(body)}.", code="invalid_json")
    return body


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python's parser takes."""
    raise ValueError(f"{name} is not JSON")


async def _parse_form(request: Request, content: bytes) -> dict[str, Any]:
    request._body = content  # where Starlette looks for a body that was read
    try:
        async with request.form(max_files=0, max_fields=32) as form:
            return {name: value for name, value in form.items() if isinstance(value, str)}
    except Exception:  # of the parser
        raise APIError(400, "The body must be a form of text fields.", code="invalid_form") from None

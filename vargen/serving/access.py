"""Who may use the service: an API key, and a limit of requests at a time."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vargen.serving.errors import APIError

KEY_VARIABLE = "VARGEN_API_KEY"


def read_api_key(environment: Mapping[str, str]) -> str | None:
    """Return the key of the environment variable; None if it is not set."""
    key = environment.get(KEY_VARIABLE)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(f"{KEY_VARIABLE} must be printable ASCII characters without spaces, or not set")
    return key


class AccessMiddleware:
    """Refuses requests without the key, and those beyond a number at a time.

    Args:
        app: the application.
        api_key: of the endpoints under /v1; None lets everyone in.
        max_requests: that are answered at a time.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, max_requests: int):
        self.app, self.max_requests, self._active = app, max_requests, 0
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if (error := self._find_error(scope)) is not None:
            await error.response(scope, receive, send)
            return
        self._active += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._active -= 1

    def _find_error(self, scope: Scope) -> APIError | None:
        if self._active >= self.max_requests:
            headers = {"Retry-After": "1", "Connection": "close"}
            return APIError(503, "Too many requests at a time.", code="overloaded", headers=headers)
        if self._expected is None or not scope["path"].startswith("/v1"):
            return None
        given = Headers(scope=scope).get("authorization", "").encode("latin-1", "replace")
        if secrets.compare_digest(given, self._expected):
            return None
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        return APIError(401, "The API key is missing or wrong.", code="invalid_api_key", headers=headers)

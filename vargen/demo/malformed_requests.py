"""Rejects what no page sends in one line, to the caller and to the log, with nothing of the server; and too many uploads."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import Request
from fastapi.responses import JSONResponse
from gradio.exceptions import Error
from gradio.route_utils import FnIndexInferError
from gradio.utils import get_upload_folder
from starlette.middleware import Middleware

logger = logging.getLogger("vargen")


class Page(gr.Blocks):
    """A page that answers invalid input to its functions with a message, where gradio would print a traceback."""

    def validate_inputs(self, block_fn: Any, inputs: list[Any]) -> None:
        """Raise an error with both counts if there are too few inputs."""
        if len(inputs) < (expected := len(block_fn.inputs)):
            raise Error(f"This function of the page takes {expected} inputs, got {len(inputs)}.", print_exception=False)

    async def process_api(self, block_fn: Any, *given: Any, **options: Any) -> Any:
        """Process a request like gradio; an error outside our own functions was caused by the content of the request."""
        try:
            return await super().process_api(block_fn, *given, **options)
        except (StopIteration, StopAsyncIteration):
            raise
        except Exception as error:
            if isinstance(error, Error) and type(error) is Error:  # a message for users, from us or a component
                error.print_exception = False
                raise
            logger.warning("a request was rejected: %s", type(error).__name__)
            logger.debug("it was rejected for this reason", exc_info=error)
            raise Error("The request contains values that this function does not take.", print_exception=False) from None


def _report_not_found(_: Request, error: Exception) -> JSONResponse:
    logger.debug("a request named no function", exc_info=error)
    return JSONResponse({"detail": "There is no such endpoint; /gradio_api/info lists them."}, 404)


def _reject(_: Request, error: Exception) -> JSONResponse:
    logger.warning("a request was rejected: %s", type(error).__name__)
    logger.debug("it was rejected for this reason", exc_info=error)
    return JSONResponse({"detail": "The request is malformed."}, 400)


# Server handlers for exceptions that gradio does not handle: they would give a 500 with a traceback in the log.
HANDLERS = {FnIndexInferError: _report_not_found, LookupError: _report_not_found, ValueError: _reject, TypeError: _reject}


class UploadLimit:
    """An ASGI middleware that refuses uploads while the files of a day, after which gradio deletes them, take `MAX_BYTES`."""

    MAX_BYTES = 512 * 2**20

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"].endswith("/upload"):
            files = Path(get_upload_folder()).rglob("*")
            if sum(each.stat().st_size for each in files if each.is_file()) > self.MAX_BYTES:
                app = JSONResponse({"detail": "The page holds too many files; try again tomorrow."}, 413)
        await app(scope, receive, send)


MIDDLEWARE = [Middleware(UploadLimit)]

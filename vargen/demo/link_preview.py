"""The head of the page: what a link to it looks like in other programs, where gradio names its own, and its first script."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

TITLE = "vargen: the same image, faster"
_DESCRIPTION = "Type a prompt and watch its image fill in, several pieces at a time. Then save it, or share its link."
_SCRIPT = Path(__file__).with_name("leaving.js").read_text("utf-8")
_TAG = re.compile(r'\s*<meta\s+(?:property|name)="(?:og|twitter):[^>]*>')


class LinkPreview:
    """ASGI middleware that replaces the Open Graph and Twitter tags of the page, and adds a script before those of gradio.

    Args:
        image: path of the preview image below the page, of 1200 x 630 pixels.
    """

    def __init__(self, app: Any, image: str):
        self.app, self.image = app, image

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request; the page itself is held back until it is complete."""
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        body = bytearray()

        async def hold(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            headers = dict(start["headers"])
            content = bytes(body)
            if headers.get(b"content-type", b"").startswith(b"text/html"):
                content = self._replace_tags(content.decode(), _base_url(scope)).encode()
                headers[b"content-length"] = str(len(content)).encode()
            await send({**start, "headers": list(headers.items())})
            await send({"type": "http.response.body", "body": content})

        await self.app(scope, receive, hold)

    def _replace_tags(self, page: str, base: str) -> str:
        head, separator, rest = page.partition("</head>")
        query = {"og:type": "website", "og:title": TITLE, "og:description": _DESCRIPTION, "og:image": f"{base}{self.image}"}
        tags = "".join(f'<meta property="{name}" content="{html.escape(value)}" />' for name, value in query.items())
        tags += f'<meta name="twitter:card" content="summary_large_image" /><script>{_SCRIPT}</script>'
        return _TAG.sub("", head).replace("<head>", f"<head>{tags}", 1) + separator + rest


def _base_url(scope: Any) -> str:
    """Return the address that the caller used, also through a proxy that says so."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    host = headers.get("x-forwarded-host") or headers.get("host", "")
    kind = headers.get("x-forwarded-proto", scope.get("scheme", "http")).split(",")[0]
    return f"{kind}://{host}{scope.get('root_path', '')}/"

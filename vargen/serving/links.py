"""Images by address, for `response_format: "url"`: the latest ones, in memory; nothing is written to a disk."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

_MAX_BYTES = 64 * 2**20


@dataclass
class ImageLinks:
    """Encoded images by unguessable names. The oldest ones are dropped when they exceed `max_bytes` together."""

    max_bytes: int = _MAX_BYTES
    _images: OrderedDict[str, tuple[bytes, str]] = field(default_factory=OrderedDict)
    _size: int = 0

    def add(self, content: bytes, media_type: str) -> str:
        """Keep an image, and return its name."""
        name = secrets.token_urlsafe(24)
        self._images[name] = content, media_type
        self._size += len(content)
        while self._size > self.max_bytes and len(self._images) > 1:
            _, (dropped, _) = self._images.popitem(last=False)
            self._size -= len(dropped)
        return name

    def find(self, name: str) -> tuple[bytes, str] | None:
        """Return an image and its media type; None for an unknown name, or one that was dropped."""
        return self._images.get(name)

"""Pictures as PNG files that carry their parameters, in the chunk `vargen` that `vargen generate` also writes."""

from __future__ import annotations

import json
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

CHUNK = "vargen"
_LONGEST_CHUNK = 20_000  # characters; ours have a few hundred
_FOREIGN = "This PNG carries no vargen parameters. Drop one that was drawn and downloaded here, or by `vargen generate`."


class PictureFolder:
    """A temporary folder of the app's own that holds its newest pictures.

    Args:
        most: files kept; older ones are deleted. Gradio serves copies, so nothing that is on a screen disappears.
    """

    def __init__(self, most: int = 256):
        self._folder = tempfile.TemporaryDirectory(prefix="vargen-demo-")
        self._files: deque[Path] = deque()
        self._most, self._count, self._lock = most, 0, threading.Lock()

    def save(self, image: Image.Image, parameters: dict[str, Any]) -> Path:
        """Write a picture; its name tells the seed and no prompt."""
        with self._lock:
            self._count += 1
            path = Path(self._folder.name) / f"{self._count}" / f"vargen-{parameters['seed']}.png"
            self._files.append(path)
            old = [self._files.popleft() for _ in range(len(self._files) - self._most)]
        path.parent.mkdir()
        chunk = PngInfo()
        chunk.add_text(CHUNK, json.dumps(parameters))
        image.save(path, format="PNG", pnginfo=chunk)
        for each in old:
            each.unlink(missing_ok=True)
            each.parent.rmdir()
        return path

    def close(self) -> None:
        """Delete the folder."""
        self._folder.cleanup()


def read_parameters(path: str | Path) -> dict[str, Any]:
    """The parameters in a PNG. No pixel is decoded.

    Raises:
        ValueError: if it is no PNG, or holds none, in words for the person who dropped it.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            text = image.info.get(CHUNK)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError("This file is not a PNG picture that can be read.") from error
    if not isinstance(text, str):
        raise ValueError(_FOREIGN)
    try:
        parameters = json.loads(text) if len(text) <= _LONGEST_CHUNK else None
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict) or not {"prompt", "class_label"} & set(parameters):
        raise ValueError("The vargen parameters in this PNG are damaged, so they cannot be reloaded.")
    return parameters

"""Source images of variations and inpainting: read safely, fitted to the model, and recorded by their digests."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from PIL import Image

from vargen.image_metadata import pixels_digest
from vargen.reading import ImageFileError, on_white, open_image
from vargen.values import parse_float, short_repr

_MAX_CHARACTERS = 6_000_000  # of what the page sends: an image in base64 and its painted cells


@dataclass(frozen=True)
class ImageSource:
    """The image that a request varies or inpaints.

    Attributes:
        image: RGB, of the model's size.
        mask: mode L, of the same size, white where the image is generated again; None: everywhere.
        strength: fraction of the scales that are generated again, in [0, 1]; None: the pipeline's default.
    """

    image: Image.Image
    mask: Image.Image | None = None
    strength: float | None = None

    def __post_init__(self) -> None:
        if self.strength is None:
            return
        value = parse_float(self.strength)
        if value is None or not 0 <= value <= 1:
            raise ValueError(
                f"The strength must be from 0 (keep the image) to 1 (a new image), not {short_repr(self.strength)}."
            )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the pipeline's call."""
        return {"image": self.image, "mask_image": self.mask, "strength": self.strength}

    def parameters(self) -> dict[str, Any]:
        """Return what a PNG records: digests of the pixels, which it does not contain."""
        found = {"image": pixels_digest(self.image), "mask": self.mask and pixels_digest(self.mask), "strength": self.strength}
        return {name: value for name, value in found.items() if value is not None}


def read_painting(sent: str, strength: Any, side: int | None, grid: tuple[int, int]) -> ImageSource | None:
    """Read what brush.js sends: `{"image": data URL, "cells": a digit per cell, row by row, 1 where painted}`.

    Args:
        strength: of a variation; where cells are painted, they are generated anew.
        side: width and height of the model's images, and of the image that is sent; None if it does not start from an image.
        grid: rows and columns of cells.

    Returns:
        None if nothing was sent.
    """
    if not sent:
        return None
    try:
        found = json.loads(sent) if len(sent) <= _MAX_CHARACTERS else {}
        content = base64.b64decode(found["image"].partition(",")[2], validate=True)
        cells = found["cells"]
        known = isinstance(cells, str) and set(cells) <= {"0", "1"} and len(cells) in (0, grid[0] * grid[1])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        known = False
    if side is None or not known:
        raise ValueError("The page sent an image that cannot be read. Please reload the page.")
    image = _open(io.BytesIO(content), "The image", (side, side))
    if "1" not in cells:
        return ImageSource(image, None, strength)
    return ImageSource(image, _mask_of_cells(cells, side, grid))


def _open(file: BinaryIO, name: str, size: tuple[int, int]) -> Image.Image:
    """Read an RGB image of this size."""
    try:
        with open_image(file, name) as opened:
            if opened.size != size:
                raise ImageFileError(name, f"it must have {size[0]}x{size[1]} pixels, not {opened.width}x{opened.height}")
            return on_white(opened)
    except ImageFileError as error:
        raise ValueError(f"{name} cannot be read: {error.reason}.") from None


def _mask_of_cells(cells: Sequence[str], side: int, grid: tuple[int, int]) -> Image.Image:
    small = Image.frombytes("L", (grid[1], grid[0]), bytes(255 * (cell == "1") for cell in cells))
    return small.resize((side, side), Image.Resampling.NEAREST)

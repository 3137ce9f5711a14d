"""Safe opening of image files from users and third parties.

Pillow selects the format by a file's first bytes, and passes PostScript to Ghostscript, which executes it. So every image is
opened here, where only raster formats are allowed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from vargen.reading import open_regular

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MOST_PIXELS = 80_000_000  # of an image; Pillow warns slightly above this
_EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV")


class PictureFileError(ValueError):
    """Raised for a file that is not an image, is damaged, or is too large.

    Attributes:
        reason: the message without the file name.
    """

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name} cannot be read: {reason}")
        self.reason = reason


@contextmanager
def opened_picture(source: str | os.PathLike[str] | BinaryIO, name: str = "picture") -> Iterator[Image.Image]:
    """Yield an opened image whose pixels are not decoded yet.

    Args:
        source: a file's path, or an open file, which is not closed. name: of the argument, for the error message.

    Raises:
        PictureFileError: naming the file, if it cannot be read, is not in one of `FORMATS` or has more than `MOST_PIXELS`
            pixels. Any error in the block, which should only decode, is converted to it, too.
    """
    path = source if isinstance(source, str | os.PathLike) else None
    said = name if path is None else f"{name} {os.fspath(path)!r}"
    try:
        with open_regular(path) if path is not None else nullcontext(source) as file:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # raised as an error here
                image = Image.open(file, formats=FORMATS)
            with image:
                if image.width * image.height > MOST_PIXELS:
                    raise Image.DecompressionBombError
                if image.mode not in _EIGHT_BITS:
                    raise PictureFileError(said, f"it must have 8 bits per channel, and has mode {image.mode}")
                yield image
    except (MemoryError, PictureFileError):
        raise
    except Image.DecompressionBombError as error:
        raise PictureFileError(said, f"it must have at most {MOST_PIXELS:,} pixels, and has more") from error
    except UnidentifiedImageError as error:
        raise PictureFileError(said, f"no picture, or none of {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow raises many types; a truncated PNG alone can give OSError, SyntaxError or ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "damaged or cut off"
        raise PictureFileError(said, reason) from error


def on_white(image: Image.Image) -> Image.Image:
    """Convert the image to RGB, with transparent areas on white."""
    if image.mode not in ("LA", "La", "PA", "RGBA", "RGBa") and "transparency" not in image.info:
        return image.convert("RGB")
    picture = image.convert("RGBA")
    canvas = Image.new("RGBA", picture.size, "white")
    canvas.alpha_composite(picture)
    return canvas.convert("RGB")

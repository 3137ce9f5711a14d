"""Safe reading of files: regular ones only, texts of bounded size, images of raster formats.

Pillow selects the format by a file's first bytes, and passes PostScript to Ghostscript, which executes it. So every image is
opened here, where only raster formats are allowed.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

from vargen.files import expand_user

STDIN = "-"  # means standard input in place of a file name
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 80_000_000  # of an image; Pillow warns slightly above this
_PNG, _MAX_CHUNK = b"\x89PNG\r\n\x1a\n", 2**24  # bytes of a part of a PNG other than its pixels
_EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV")


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading; OSError for others, as a pipe would block, and a device has no end."""
    if stat.S_ISREG(os.stat(path).st_mode):  # checked first: merely opening a device can have effects
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        if stat.S_ISREG(os.fstat(file).st_mode):
            return os.fdopen(file, "rb")
        os.close(file)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_text(path: str | Path, name: str, max_bytes: int) -> str:
    """Read UTF-8 text from a regular file, or from standard input if `path` is `-`.

    Errors name the argument, `name`: ValueError, FileNotFoundError, IsADirectoryError or PermissionError.
    """
    if str(path) == STDIN:
        if sys.stdin is None:
            raise ValueError(f"{name} '-' is standard input, which is closed")
        what, data = f"{name} '-', standard input,", sys.stdin.buffer.read(max_bytes + 1)
    else:
        path = expand_user(path, name)
        what = f"{name} {str(path)!r}"
        try:
            with open_regular(path) as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError:
            raise FileNotFoundError(f"{what} does not exist") from None
        except (IsADirectoryError, PermissionError) as error:
            raise type(error)(f"{what} cannot be read: {error.strerror}") from None
        except OSError as error:
            raise ValueError(f"{what} cannot be read: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise ValueError(f"{what} must hold at most {max_bytes:,} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} must be UTF-8 text: {error}") from error


class ImageFileError(ValueError):
    """Raised for a file that is no image, damaged, or too large; `reason` is without the file name."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name} cannot be read: {reason}")
        self.reason = reason


def validate_png_chunks(file: BinaryIO) -> None:
    """Raise ValueError for a PNG with a huge part before its pixels, which Pillow would read whole.

    The file, of any format, is at the same place afterwards.
    """
    start = file.tell()
    if file.read(len(_PNG)) == _PNG:
        while len(head := file.read(8)) == 8 and head[4:] not in (b"IDAT", b"IEND"):
            size = int.from_bytes(head[:4], "big")
            if size > _MAX_CHUNK:
                raise ValueError(f"a part of {size:,} bytes; at most {_MAX_CHUNK:,} are read")
            file.seek(size + 4, os.SEEK_CUR)
    file.seek(start)


@contextmanager
def open_image(source: str | os.PathLike[str] | BinaryIO, name: str = "image") -> Iterator[Image.Image]:
    """Yield an opened image whose pixels are not decoded yet.

    Args:
        source: a file's path, or an open file, which is not closed. name: of the argument, for the error message.

    Raises:
        ImageFileError: for an image that cannot be used, and for any error in the block, which should only decode.
    """
    path = source if isinstance(source, str | os.PathLike) else None
    label = name if path is None else f"{name} {os.fspath(path)!r}"
    try:
        opened: Any = open_regular(path) if path is not None else nullcontext(source)
        with opened as file:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # raised as an error here
                validate_png_chunks(file)
                image = Image.open(file, formats=FORMATS)
            with image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                if image.mode not in _EIGHT_BITS:
                    raise ImageFileError(label, f"it must have 8 bits per channel, and has mode {image.mode}")
                yield image
    except (MemoryError, ImageFileError):
        raise
    except Image.DecompressionBombError as error:
        raise ImageFileError(label, f"it must have at most {MAX_PIXELS:,} pixels, and has more") from error
    except UnidentifiedImageError as error:
        raise ImageFileError(label, f"no image, or none of {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow raises many types; a truncated PNG alone can give OSError, SyntaxError or ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "damaged or cut off"
        raise ImageFileError(label, reason) from error


def apply_orientation(image: Image.Image) -> Image.Image:
    """Rotate and flip an image as its EXIF data says, unless this is damaged."""
    image.load()  # so that damaged pixels are reported, and not taken for damaged EXIF data
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # Pillow raises many types
        return image


def on_white(image: Image.Image) -> Image.Image:
    """Convert the image to RGB, with its EXIF orientation applied and transparent areas on white."""
    image = apply_orientation(image)
    if image.mode not in ("LA", "La", "PA", "RGBA", "RGBa") and "transparency" not in image.info:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    canvas = Image.new("RGBA", layer.size, "white")
    canvas.alpha_composite(layer)
    return canvas.convert("RGB")

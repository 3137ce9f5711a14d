"""Image files to measure, from any source."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vargen.evaluation.run_directory import file_digest
from vargen.reading import ImageFileError, on_white, open_image

_MAX_NAMED = 5  # skipped files in a warning
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_THUMBNAIL_FOLDERS = ("__MACOSX", "@eaDir")  # of macOS archives, and of network storage; hidden ones begin with a dot
logger = logging.getLogger("vargen")


@dataclass(frozen=True)
class ImageFile:
    """An image file to measure.

    Attributes:
        index: in its group. text: its prompt; None if there is none. sha256: digest of the file.
        baseline_file: file of the baseline's image with the same index.
    """

    index: int
    file: str
    text: str | None
    sha256: str
    baseline_file: str | None = None


class UnreadableImageError(ValueError):
    """Raised for a file that is not an image, or is damaged."""


def read_image(file: Path) -> Image.Image:
    """Read an image completely, as RGB, with its EXIF orientation applied and transparent areas on white.

    Raises:
        UnreadableImageError: naming the file.
    """
    try:
        with open_image(file) as opened:
            return on_white(opened)
    except ImageFileError as error:
        raise UnreadableImageError(f"{file} cannot be read ({error.reason}); --skip-unreadable skips such files") from error


def list_images(folder: Path, prompts: Sequence[str] | None = None) -> list[ImageFile]:
    """Return the images under a folder in natural order of their names: 2.png before 10.png.

    Hidden files, those in folders of thumbnails, and empty files are skipped, with a warning that names them.

    Args:
        prompts: one for each image in this order, including empty files. Default: those in the metadata of our PNG files.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder {str(folder)!r} does not exist")
    found = [file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()]
    found.sort(key=lambda file: _natural_order(file.relative_to(folder)))
    hidden = [file for file in found if _is_hidden(file.relative_to(folder))]
    files = [file for file in found if not _is_hidden(file.relative_to(folder))]
    empty = [file for file in files if file.stat().st_size == 0]
    if hidden or empty:
        names = [file.relative_to(folder).as_posix() for file in (*hidden, *empty)]
        listed = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
        logger.warning("skipped %d hidden, thumbnail or empty files in %r: %s", len(names), str(folder), listed)
    if len(files) == len(empty):
        raise ValueError(f"folder {str(folder)!r} holds no images ({', '.join(suffix[1:] for suffix in SUFFIXES)})")
    if prompts is not None and len(prompts) != len(files):
        count = f"{len(files)} images in {str(folder)!r}" + (f", of which {len(empty)} are empty files" if empty else "")
        raise ValueError(f"prompts must be one for each of {count}, got {len(prompts)}")
    texts = [_prompt_from_metadata(file) for file in files] if prompts is None else prompts
    pairs = [(file, text) for file, text in zip(files, texts, strict=True) if file.stat().st_size]
    return [ImageFile(i, str(file), text, file_digest(file)) for i, (file, text) in enumerate(pairs)]


def _natural_order(file: Path) -> tuple[list[list[str | int]], str]:
    """Return a sort key by which numbers in names are compared as numbers."""
    # The pattern is a group, so that texts and numbers alternate and each is compared with its like.
    parts = [re.split(r"(\d+)", part) for part in file.with_suffix("").parts]
    return [[int(text) if i % 2 else text for i, text in enumerate(part)] for part in parts], str(file)


def _is_hidden(file: Path) -> bool:
    """Return whether a file, or a folder that it is in, is hidden or holds thumbnails."""
    return any(part.startswith(".") or part in _THUMBNAIL_FOLDERS for part in file.parts)


def _prompt_from_metadata(file: Path) -> str | None:
    """Return the prompt that our images store in their PNG text chunk `vargen`."""
    try:
        with open_image(file) as opened:
            held = json.loads(opened.info.get("vargen", "{}"))
    except Exception:  # unreadable: reported when it is measured
        return None
    text = held.get("text", held.get("prompt")) if isinstance(held, dict) else None
    return text if isinstance(text, str) else None

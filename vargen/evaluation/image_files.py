"""Image files to measure, from any source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vargen.evaluation.run_directory import file_digest
from vargen.reading import ImageFileError, on_white, open_image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


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
    """Read an image completely, as RGB, with transparent areas on white.

    Raises:
        UnreadableImageError: naming the file.
    """
    try:
        with open_image(file) as opened:
            return on_white(opened)
    except ImageFileError as error:
        raise UnreadableImageError(f"{file} cannot be read ({error.reason}); --skip-unreadable skips such files") from error


def list_images(folder: Path, prompts: Sequence[str] | None = None) -> list[ImageFile]:
    """Return the images under a folder, sorted by name; prompts are given in that order, or read from our PNG files.

    Raises:
        ValueError: the folder has no images, or another number of prompts. FileNotFoundError: it is missing.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder {str(folder)!r} does not exist")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise ValueError(f"folder {str(folder)!r} holds no images ({', '.join(suffix[1:] for suffix in SUFFIXES)})")
    if prompts is not None and len(prompts) != len(files):
        raise ValueError(f"prompts must be one for each of {len(files)} images in {str(folder)!r}, got {len(prompts)}")
    texts = [_prompt_from_metadata(file) for file in files] if prompts is None else prompts
    return [ImageFile(i, str(file), text, file_digest(file)) for i, (file, text) in enumerate(zip(files, texts, strict=True))]


def _prompt_from_metadata(file: Path) -> str | None:
    """Return the prompt that our images store in their PNG text chunk `vargen`."""
    try:
        with open_image(file) as opened:
            held = json.loads(opened.info.get("vargen", "{}"))
    except Exception:  # unreadable: reported when it is measured
        return None
    text = held.get("text", held.get("prompt")) if isinstance(held, dict) else None
    return text if isinstance(text, str) else None

"""Where pictures go: names made of prompts, checks before anything is drawn, files that appear whole."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vargen.files import whole_file

# Lower-case suffix -> Pillow's format and how to save it.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".png": ("PNG", {}),
    ".jpg": ("JPEG", {"quality": 95}),
    ".jpeg": ("JPEG", {"quality": 95}),
    ".webp": ("WEBP", {"lossless": True}),
}
LONGEST_SLUG = 40
_LONGEST_NAME = 200  # bytes; file systems allow 255, and the temporary name is longer
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


@dataclass(frozen=True)
class Target:
    """A file to write. `named`: by the user, who then means to overwrite it."""

    path: Path
    named: bool


def slug(text: str) -> str:
    """A file name's worth of a prompt: 1 to 40 of a-z, 0-9 and single inner hyphens; never a name that systems reserve."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    short = re.sub("[^a-z0-9]+", "-", plain).strip("-")[:LONGEST_SLUG].strip("-")
    return f"image-{short}" if short in _RESERVED else short or "image"


def targets(output: str | None, stems: list[str]) -> list[Target]:
    """The file of each image; `stems` name those that the user does not name.

    `output` is a folder if it exists as one, ends with a separator or has no suffix; else a file, numbered from 1 when
    there are several images. None is the current folder.

    Raises:
        ValueError: for a suffix of no known format, or a place that cannot be written.
    """
    if output is None or _is_folder(output):
        folder = Path(output or ".").expanduser()
        check_writable(folder)
        return [Target(folder / f"{stem}.png", named=False) for stem in stems]
    path = Path(output).expanduser()
    known = ", ".join(suffix[1:] for suffix in FORMATS)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"output must be a folder (end it with {os.sep}) or a file ending in one of {known}, got {output!r}")
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise ValueError(f"output must have a name of at most {_LONGEST_NAME} bytes, got {len(os.fsencode(path.name))}")
    check_writable(path.parent)
    paths = [path]
    if len(stems) > 1:
        paths = [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, len(stems) + 1)]
    for each in paths:
        if each.is_dir():
            raise ValueError(f"output {str(each)!r} is a folder; give a file name that is free")
    return [Target(each, named=True) for each in paths]


def _is_folder(output: str) -> bool:
    if output in ("", "-"):
        raise ValueError(f"output must name a file or a folder, got {output!r}")
    separators = tuple(s for s in (os.sep, os.altsep) if s)
    try:
        exists = Path(output).expanduser().is_dir()
    except OSError as error:  # a name too long, links in a circle
        raise ValueError(f"output {output!r} cannot be written: {error.strerror}") from error
    return exists or output.endswith(separators) or not Path(output).suffix


def check_writable(folder: Path) -> None:
    """Raise ValueError unless files can be made in `folder`, or the folder itself can be made. Leaves nothing behind."""
    try:
        nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists() or p.is_symlink())
        if not nearest.is_dir():
            raise ValueError(f"output folder {str(folder)!r} cannot be written: {str(nearest)!r} is not a folder")
        with tempfile.TemporaryFile(dir=nearest):  # the one check that also holds for root and read-only disks
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"output folder {str(folder)!r} cannot be written: {reason}") from error


def save_image(image: Any, target: Target, parameters: dict[str, Any]) -> Path:
    """Write a PIL image whole or not at all; returns where. PNG files carry `parameters` as JSON in a text chunk `vargen`.

    A name that the user did not give is never overwritten: `apple-7.png` becomes `apple-7-2.png`.
    """
    from PIL.PngImagePlugin import PngInfo

    path = target.path
    for number in itertools.count(2):
        if target.named or not os.path.lexists(path):
            break
        path = target.path.with_name(f"{target.path.stem}-{number}{target.path.suffix}")
    kind, options = FORMATS[path.suffix.lower()]
    if kind == "PNG":
        chunk = PngInfo()
        chunk.add_text("vargen", json.dumps(parameters))
        options = {**options, "pnginfo": chunk}
    with whole_file(path) as temporary:
        image.save(temporary, format=kind, **options)
    return path

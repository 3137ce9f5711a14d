"""Requests from the page: their limits, and their conversion to and from the parameters in a PNG."""

from __future__ import annotations

import math
import secrets
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from PIL import Image

from vargen.decoding import DEFAULT_METHOD
from vargen.demo.sources import ImageSource
from vargen.image_metadata import png_file
from vargen.values import OPTIONS

MAX_PROMPT = 300  # characters
MAX_IMAGES = 4
MAX_CANDIDATES = 8  # per image
MAX_RACERS = 4  # methods per race
MAX_SEED = 2**53 - 1 - MAX_IMAGES  # largest exact integer in a browser, with room for the last image's seed
NUM_RANDOM_SEEDS = 2**32
# Field -> (minimum, maximum, whether an integer, display name). For sampling, the ranges of the page's controls.
RANGES: dict[str, tuple[float, float, bool, str]] = {
    "seed": (0, MAX_SEED, True, "The seed"),
    **{name: (*option.slider[:2], option.range.is_integer, option.label) for name, option in OPTIONS.items()},
    "num_images": (1, MAX_IMAGES, True, "The number of images"),
    "best_of": (1, MAX_CANDIDATES, True, "The number of candidates"),
}

_NOT_RECORDED = ("num_images", "best_of", "source")  # fields that are no parameters of a single image


@dataclass(frozen=True)
class PageRequest:
    """What a visitor asks for: the checked arguments of one generation.

    Attributes:
        prompt: text, or for class-conditional models the name or number of a class.
        method: a preset's name, with or without settings.
        seed: of the first image; image k has `seed + k`.
        guidance_scale, temperature, top_p: as the pipeline takes them.
        top_k: 0 keeps every token.
        negative_prompt: empty for none.
        num_images: number of images.
        best_of: candidates per image, from which the scorer selects the best.
        source: the image to vary or inpaint; None for generation from scratch.
    """

    prompt: str
    method: str = DEFAULT_METHOD
    seed: int = 0
    guidance_scale: float = 4.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    negative_prompt: str = ""
    num_images: int = 1
    best_of: int = 1
    source: ImageSource | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "negative_prompt"):
            object.__setattr__(self, name, _check_text(getattr(self, name), name))
        if not self.prompt:
            raise ValueError("Type a prompt first, for example: a red apple")
        if not isinstance(self.method, str) or not self.method:
            raise ValueError("Choose a method first.")
        for name, limits in RANGES.items():
            object.__setattr__(self, name, _check_number(getattr(self, name), *limits))

    def parameters(self) -> dict[str, Any]:
        """Return the parameters as `vargen generate` writes them to a PNG, so that each can read the other's images."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_RECORDED}
        values["accelerator"] = values.pop("method")
        source = self.source.parameters() if self.source else {}
        return {**values, "top_k": self.top_k or None, "negative_prompt": self.negative_prompt or None, **source}

    def single(self, number: int, seed: int | None = None) -> PageRequest:
        """Return the request for image `number` of a batch alone; `seed` is that of a selected candidate."""
        return replace(self, seed=self.seed + number if seed is None else seed, num_images=1, best_of=1)


def new_seed() -> int:
    return secrets.randbelow(NUM_RANDOM_SEEDS)


def request_from_metadata(parameters: dict[str, Any], defaults: dict[str, Any]) -> PageRequest:
    """Return the request stored in a PNG's parameters; missing values come from `defaults`."""
    prompt = parameters.get("prompt", parameters.get("class_label"))
    values = {**parameters, "prompt": None if prompt is None else str(prompt), "method": parameters.get("accelerator", "ar")}
    known = {field.name for field in fields(PageRequest)} - set(_NOT_RECORDED)
    given = {name: value for name, value in values.items() if name in known and value is not None}
    return PageRequest(**{**defaults, **({"top_k": 0} if "top_k" in parameters else {}), **given})


def _check_text(value: Any, name: str) -> str:
    title = "The prompt" if name == "prompt" else "The negative prompt"
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{title} must be text.")
    if len(value) > MAX_PROMPT:
        raise ValueError(f"{title} has {len(value)} characters; at most {MAX_PROMPT} are allowed here.")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError(f"{title} contains bytes that are not text.")
    return " ".join(value.split())


def _check_number(value: Any, least: float, most: float, whole: bool, title: str) -> float | int:
    kind = "a whole number" if whole else "a number"
    plain = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not plain or not least <= value <= most or (whole and value != int(value)):
        given = f"not {value}" if plain else "please fill it in"
        raise ValueError(f"{title} must be {kind} from {least} to {most}, {given}.")
    return int(value) if whole else float(value)


class ImageFolder:
    """A temporary folder with the latest images of the app.

    Args:
        max_files: number of files kept; older ones are deleted. Gradio serves copies, so images on screen do not disappear.
    """

    def __init__(self, max_files: int = 1024):
        self._folder = tempfile.TemporaryDirectory(prefix="vargen-demo-")
        self._files: deque[Path] = deque()
        self._max_files, self._count, self._lock = max_files, 0, threading.Lock()

    def save(self, image: Image.Image, parameters: dict[str, Any]) -> Path:
        """Write an image; its file name contains the seed and not the prompt."""
        return self.write(f"vargen-{parameters['seed']}.png", png_file(image, parameters))

    def write(self, name: str, content: bytes) -> Path:
        """Write a file of this name, in a folder of its own."""
        with self._lock:
            self._count += 1
            path = Path(self._folder.name) / f"{self._count}" / name
            self._files.append(path)
            old = [self._files.popleft() for _ in range(len(self._files) - self._max_files)]
        path.parent.mkdir()
        path.write_bytes(content)
        for each in old:
            each.unlink(missing_ok=True)
            each.parent.rmdir()
        return path

    def close(self) -> None:
        """Delete the folder."""
        self._folder.cleanup()

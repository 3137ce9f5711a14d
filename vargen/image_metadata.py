"""Parameters in PNG files: the text chunk `vargen` of JSON, and `parameters` for other programs."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from vargen.reading import open_regular, validate_png_chunks

if TYPE_CHECKING:
    import torch

CHUNK = "vargen"
_TEXT_CHUNK = "parameters"
_WHOLE, _PIECES = 64 * 2**20, 64  # bytes of a file that are read in full; pieces of 1 MiB that are read of a larger one
_MAX_CHUNK = 20_000  # characters; our own chunks have a few hundred
_NO_PARAMETERS = "This PNG carries no vargen parameters. Take one that the demo or `vargen generate` wrote."


def png_chunks(parameters: Mapping[str, Any], size: tuple[int, int] | None = None) -> PngInfo:
    """Return the text chunks of an image with these parameters; `size` is its width and height in pixels."""
    chunks = PngInfo()
    chunks.add_text(CHUNK, json.dumps(parameters))
    chunks.add_itxt(_TEXT_CHUNK, describe_parameters(parameters, size))
    return chunks


def png_file(image: Image.Image, parameters: Mapping[str, Any]) -> bytes:
    """Return an image as a PNG file that carries its parameters."""
    file = io.BytesIO()
    image.save(file, format="PNG", pnginfo=png_chunks(parameters, image.size))
    return file.getvalue()


def describe_parameters(parameters: Mapping[str, Any], size: tuple[int, int] | None = None) -> str:
    """Return parameters as other image programs show them: prompts and one line of values."""
    names = {
        "Sampler": "accelerator", "CFG scale": "guidance_scale", "Seed": "seed", "Model": "model", "Model hash": "model_digest",
        "Temperature": "temperature", "Top-k": "top_k", "Top-p": "top_p",
        "Min-p": "min_p", "Denoising strength": "strength",
    }  # fmt: skip
    values = {title: parameters.get(name) for title, name in names.items()}
    values["Size"] = None if size is None else f"{size[0]}x{size[1]}"
    values["Version"] = f"vargen {version}" if (version := (parameters.get("versions") or {}).get("vargen")) else None
    lines = [str(parameters.get("prompt", parameters.get("class_label", "")))]
    lines += [f"Negative prompt: {negative}"] if (negative := parameters.get("negative_prompt")) else []
    return "\n".join([*lines, ", ".join(f"{title}: {value}" for title, value in values.items() if value is not None)])


def tokens_digest(tokens: torch.Tensor) -> str:
    """Return sixteen hexadecimal digits that identify the tokens of an image."""
    return hashlib.sha256(tokens.detach().cpu().reshape(-1).numpy().astype("<i8").tobytes()).hexdigest()[:16]


def model_digest(folder: Path) -> str:
    """Return sixteen hexadecimal digits of a model folder's weights (of large files, parts) and index."""
    digest = hashlib.sha256()
    files = [*folder.rglob("*.safetensors"), *folder.glob("*.json")]
    for file in sorted(file for file in files if file.is_file() and file.name != "training.json"):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()} {size}\n".encode())
        with file.open("rb") as opened:
            if size <= _WHOLE:
                digest.update(opened.read())
                continue
            for piece in range(_PIECES):
                opened.seek(piece * (size - 2**20) // (_PIECES - 1))
                digest.update(opened.read(2**20))
    return digest.hexdigest()[:16]


def pixels_digest(image: Image.Image) -> str:
    """Return sixteen hexadecimal digits that identify the pixels of an image."""
    return hashlib.sha256(f"{image.size}".encode() + image.convert("RGB").tobytes()).hexdigest()[:16]


def read_parameters(source: str | Path | BinaryIO) -> dict[str, Any]:
    """Read the parameters in a PNG, a path or an open file, without decoding pixels."""
    try:
        with open_regular(source) if isinstance(source, str | Path) else nullcontext(source) as file:
            validate_png_chunks(file)
            with Image.open(file, formats=["PNG"]) as image:
                text = image.info.get(CHUNK)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError("This file is not a readable PNG.") from error
    if not isinstance(text, str):
        raise ValueError(_NO_PARAMETERS)
    try:
        parameters = json.loads(text) if len(text) <= _MAX_CHUNK else None
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict) or not {"prompt", "class_label"} & set(parameters):
        raise ValueError("The vargen parameters in this PNG are damaged, so they cannot be read.")
    return parameters

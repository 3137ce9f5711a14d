"""Contact sheets: images in a grid, with captions below and labels at the left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vargen.eval.run import ImageFile, UnreadableImageError, read_image
from vargen.files import atomic_file

if TYPE_CHECKING:
    from vargen.bench.compare import Comparison
    from vargen.eval.video import VideoComparison
    from vargen.pipelines.base import VisualPipeline

_MARGIN, _CAPTION = 6, 16  # pixels
COLUMNS, _CELL = 8, 128  # images of a row, pixels of an image
METHOD_GRID = "methods.png"


def contact_sheet(images: Sequence[Image.Image], captions: Sequence[str], columns: int = 8, cell: int = 128) -> Image.Image:
    """Return one RGB image: all images scaled to `cell` pixels, with captions below, truncated to the cell width."""
    if not images or len(images) != len(captions):
        raise ValueError(f"give one caption per image and at least one, got {len(captions)} for {len(images)}")
    rows = math.ceil(len(images) / columns)
    size = columns * (cell + _MARGIN) + _MARGIN, rows * (cell + _CAPTION + _MARGIN) + _MARGIN
    sheet = Image.new("RGB", size, "white")
    canvas, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x = _MARGIN + i % columns * (cell + _MARGIN)
        y = _MARGIN + i // columns * (cell + _CAPTION + _MARGIN)
        sheet.paste(image.convert("RGB").resize((cell, cell), Image.Resampling.LANCZOS), (x, y))
        while caption and canvas.textlength(caption, font=font) > cell:
            caption = caption.rstrip("…")[:-1] + "…"
        canvas.text((x, y + cell + 1), caption, fill="#444", font=font)
    return sheet


def labeled_grid(
    labels: Sequence[Sequence[str]], images: Sequence[Image.Image], captions: Sequence[str], cell: int = _CELL
) -> Image.Image:
    """Return a contact sheet with a row per label, of equally many images; the lines of a label are at the left of its row."""
    sheet = contact_sheet(images, captions, len(images) // len(labels), cell)
    font = ImageFont.load_default(size=13)
    width = 16 + max(round(font.getlength(line)) for lines in labels for line in lines)
    grid = Image.new("RGB", (sheet.width + width, sheet.height), "white")
    grid.paste(sheet, (width, 0))
    canvas = ImageDraw.Draw(grid)
    for row, lines in enumerate(labels):
        top = round(_MARGIN + row * (cell + _CAPTION + _MARGIN) + cell / 2) - 8 * len(lines)
        for number, line in enumerate(lines):
            canvas.text((8, top + 16 * number), line, fill="#555" if number else "#111", font=font)
    return grid


def method_grid(pipe: VisualPipeline, comparison: Comparison, max_columns: int = 8, cell: int = _CELL) -> Image.Image:
    """Return a grid with a row per method and a column per prompt, with equal seeds."""
    columns = min(max_columns, len(comparison.prompts))
    images: list[Image.Image] = []
    for method in comparison.methods:
        images += pipe.decode_tokens(comparison.tokens[method.name][:columns].to(pipe.device))
    labels = [(method.name, f"{method.seconds_per_image:.2f} s") for method in comparison.methods]
    return labeled_grid(labels, images, [*comparison.prompts[:columns]] * len(labels), cell)


def frame_strips(comparison: VideoComparison, max_columns: int = 8, cell: int = 64) -> Image.Image:
    """Return, for each prompt whose frames were kept, a row of frames by each method."""
    labels, images = [], []
    for video, prompt in enumerate(comparison.prompts[: len(next(iter(comparison.frames.values())))]):
        for name, videos in comparison.frames.items():
            frames = videos[video]
            chosen = np.linspace(0, len(frames) - 1, min(max_columns, len(frames))).round().astype(int)
            images += [Image.fromarray(frames[number]) for number in chosen]
            labels.append((name, prompt[:16]))
    return labeled_grid(labels, images, [""] * len(images), cell)


def write_method_grid(folder: Path, groups: Mapping[str, Sequence[ImageFile]]) -> list[str]:
    """Write a grid with a row per group, and a column per index that all groups have; returns the names of written files."""
    by_index = {group: {file.index: file for file in files} for group, files in groups.items()}
    common = sorted(set.intersection(*(set(files) for files in by_index.values())))[:COLUMNS]
    files = [by_index[group][index] for group in groups for index in common]
    images = [image for file in files if (image := _try_read(file)) is not None]
    if not images or len(images) < len(files):
        return []
    grid = labeled_grid([(group,) for group in groups], images, [file.text or str(file.index) for file in files])
    with atomic_file(folder / METHOD_GRID) as temporary:
        grid.save(temporary, format="PNG")
    return [METHOD_GRID]


def _try_read(file: ImageFile) -> Image.Image | None:
    try:
        return read_image(Path(file.file))
    except UnreadableImageError:
        return None

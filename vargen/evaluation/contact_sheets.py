"""Contact sheets: images in a grid with captions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vargen.files import atomic_file


def contact_sheet(images: Sequence[Image.Image], captions: Sequence[str], columns: int = 8, cell: int = 128) -> Image.Image:
    """Return one RGB image: all images scaled to `cell` pixels, with captions below, truncated to the cell width.

    Raises:
        ValueError: there are no images, or not one caption for each.
    """
    if not images or len(images) != len(captions):
        raise ValueError(f"give one caption per image and at least one, got {len(images)} images, {len(captions)} captions")
    margin, text = 6, 16
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * (cell + margin) + margin, rows * (cell + text + margin) + margin), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x = margin + i % columns * (cell + margin)
        y = margin + i // columns * (cell + text + margin)
        sheet.paste(image.convert("RGB").resize((cell, cell), Image.Resampling.LANCZOS), (x, y))
        while caption and draw.textlength(caption, font=font) > cell:
            caption = caption.rstrip("…")[:-1] + "…"
        draw.text((x, y + cell + 1), caption, fill="#444", font=font)
    return sheet


def blind_sheet(
    prompts: Sequence[str], draw: Callable[[Sequence[str], int], Tensor], target: Path, seed: int = 0, batch: int = 32
) -> Path:
    """Write a PNG of numbered images in shuffled order, for blind raters; returns the path of its key.

    Args:
        draw: maps prompts and a seed to images `[N, 3, Y, X]` in [0, 1].

    The key, `{number: prompt}`, is written next to the PNG.
    """
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    pictures = []
    for start in range(0, len(order), batch):
        images = draw([prompts[n] for n in order[start : start + batch]], seed + start)
        pictures += [Image.fromarray(each) for each in (images * 255).round().byte().permute(0, 2, 3, 1).numpy()]
    sheet = contact_sheet(pictures, [str(n + 1) for n in range(len(pictures))])
    key = target.with_suffix(".key.json")
    with atomic_file(key) as temporary:
        temporary.write_text(json.dumps({n + 1: prompts[place] for n, place in enumerate(order)}, indent=1) + "\n", "utf-8")
    with atomic_file(target) as temporary:
        sheet.save(temporary, format="PNG")
    return key

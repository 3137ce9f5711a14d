"""Pictures side by side with their captions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont


def contact_sheet(images: Sequence[Image.Image], captions: Sequence[str], columns: int = 8, cell: int = 128) -> Image.Image:
    """One RGB picture: every image scaled to `cell` pixels, its caption under it, cut to the cell's width.

    Raises:
        ValueError: if there are no images, or not one caption for each.
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

"""The share card: an image, its prompt and the passes it took, as one PNG of the size that link previews use."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import IO

from PIL import Image, ImageDraw, ImageFont

from vargen.reading import FORMATS

SIZE = (1200, 630)  # of the previews of links
_INK, _SOFT, _PAPER, _ACCENT = "#1e2337", "#59607a", "#f3f5fa", "#4453bd"


def share_card(file: str | Path | IO[bytes], prompt: str, passes: int, tokens: int, seconds: float, footer: str) -> Image.Image:
    """Return the card of an image file.

    Args:
        passes: of the network; tokens: of the image. footer: such as model, method and seed.
    """
    card = Image.new("RGB", SIZE, _PAPER)
    with Image.open(file, formats=FORMATS) as opened:
        side = 534
        factor = side // max(opened.size)
        method = Image.Resampling.NEAREST if factor * max(opened.size) == side else Image.Resampling.LANCZOS
        card.paste(opened.convert("RGB").resize((side, side), method), (48, 48))
    pen, left, top = ImageDraw.Draw(card), 640, 72
    for line in textwrap.wrap(prompt, 22)[:4]:
        pen.text((left, top), line, _INK, _font(46))
        top += 58
    pen.text((left, top + 26), f"{passes} passes", _ACCENT, _font(60))
    pen.text((left, top + 104), f"for {tokens} tokens, in {seconds:.2f} seconds", _SOFT, _font(30))
    for row, line in enumerate(reversed(textwrap.wrap(footer, 36)[:3])):
        pen.text((left, 540 - 36 * row), line, _SOFT, _font(26))
    return card


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)

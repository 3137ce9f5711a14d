"""What the page shows of a drawing, as HTML: pictures, the token map, progress, comparisons. Pure functions.

Everything that a person may have typed goes through `text`. Nothing is told by colour alone.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

_CELL = 20  # units of a token in the map's drawing
_LEVELS = 8  # shades; more accepted tokens than this share the last


def text(value: object) -> str:
    """Any text as inert HTML, also for the template languages that Gradio runs over it."""
    return html.escape(str(value)).translate({ord("{"): "&#123;", ord("}"): "&#125;", ord("$"): "&#36;", ord("`"): "&#96;"})


def picture(image: Image.Image | bytes | None, alt: str) -> str:
    """An `<img>` that holds its own data: finished pictures as PNG, previews as they come; None is an empty frame."""
    if image is None:
        return f'<div class="vg-picture" role="img" aria-label="{text(alt)}"></div>'
    kind = "webp"
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, format="PNG")
        image, kind = file.getvalue(), "png"
    data = base64.b64encode(image).decode()
    return f'<img class="vg-picture" alt="{text(alt)}" src="data:image/{kind};base64,{data}">'


def stage(images: Sequence[Image.Image | bytes | None], alt: str, captions: Sequence[str] = ()) -> str:
    """Pictures, as large as they fit, each with its caption if there are any."""
    cells = [picture(image, alt if len(images) == 1 else f"{alt}, picture {k}") for k, image in enumerate(images, 1)]
    if captions:
        pairs = zip(cells, captions, strict=True)
        cells = [f"<figure>{cell}<figcaption>{text(caption)}</figcaption></figure>" for cell, caption in pairs]
    return f'<div class="vg-stage vg-n{min(len(images), 5)}">{"".join(cells)}</div>'


def scored(told: dict[str, Any]) -> str:
    """A caption of what `DecodeStats.picture` says; empty where nothing was scored."""
    if "score" not in told:
        return ""
    others = sorted((each for each in told.get("candidates", ())), reverse=True)[1:]
    beside = f", chosen before {', '.join(f'{each:.1f}' for each in others)}" if others else ""
    return f"score {told['score']:.1f}{beside}"


def token_map(counts: Iterable[int], grids: Sequence[tuple[int, int]]) -> str:
    """Tokens in drawing order, one pill per pass, as long as the tokens that the pass committed.

    Args:
        grids: rows and columns of each grid of tokens; a picture has one, or one per scale.
    """
    rows, width, height = _placed(grids)
    parts, position, passes, total = [], 0, 0, sum(columns for *_, columns in rows)
    for count in counts:
        passes += 1
        count = min(count, total - position)
        if count < 1:
            continue
        shade = min(count, _LEVELS)
        pieces = list(_pieces(rows, position, position + count))
        body = [f'<rect x="{x + 1.5}" y="{y + 1.5}" width="{wide - 3}" height="{_CELL - 3}" rx="6"/>' for x, y, wide in pieces]
        if count > 1:
            x, y, _ = pieces[0]
            body.append(f'<text x="{x + _CELL / 2}" y="{y + _CELL / 2}">{count}</text>')
        plural = "s" if count > 1 else ""
        parts.append(f'<g class="k{shade}"><title>pass {passes}: {count} token{plural}</title>{"".join(body)}</g>')
        position += count
    half = _CELL / 2
    rest = "".join(
        f'<circle class="u" cx="{x + cell + half}" cy="{y + half}" r="1.6"/>'
        for x, y, wide in _pieces(rows, position, total)
        for cell in range(0, wide, _CELL)
    )
    label = f"Token map: {position} of {total} tokens drawn in {passes} passes"
    return f'<svg class="vg-map" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}{rest}</svg>'


def _placed(grids: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int, int]], int, int]:
    """Each row of tokens in drawing order, as x, y and columns, and the drawing's width and height.

    Grids stand side by side, a cell apart, and go on below where they would be wider than two of the widest.
    """
    most = 2 * max(columns for _, columns in grids) + 1 if len(grids) > 1 else grids[0][1]
    rows, left, top, tall, wide = [], 0, 0, 0, 0
    for height, columns in grids:
        if left and left + columns > most:
            left, top, tall = 0, top + tall + 1, 0
        rows += [(left * _CELL, (top + row) * _CELL, columns) for row in range(height)]
        left, tall, wide = left + columns + 1, max(tall, height), max(wide, left + columns)
    return rows, wide * _CELL, (top + tall) * _CELL


def _pieces(rows: Sequence[tuple[int, int, int]], first: int, last: int) -> Iterable[tuple[int, int, int]]:
    """The places of the tokens from `first` to before `last`: x, y and width of what lies in one row."""
    start = 0
    for x, y, columns in rows:
        begin, end = max(first, start), min(last, start + columns)
        if begin < end:
            yield x + (begin - start) * _CELL, y, (end - begin) * _CELL
        start += columns


def legend() -> str:
    """How to read the token map."""
    shades = "".join(f'<i class="k{k}">{k}{"+" if k == _LEVELS else ""}</i>' for k in (1, 2, 3, 4, 6, _LEVELS))
    return (
        f'<p class="vg-legend"><span>One pill is one pass; tokens it accepted:</span> <span class="vg-keys">{shades}</span></p>'
    )


def progress(drawn: int, total: int, note: str = "") -> str:
    return (
        f'<div class="vg-progress"><progress max="{total}" value="{drawn}" aria-label="tokens drawn"></progress>'
        f"<span>{drawn} of {total} tokens{text(note)}</span></div>"
    )


def numbers(values: dict[str, str]) -> str:
    """Small figures in a row: what -> how much."""
    cells = "".join(f"<div><dt>{text(what)}</dt><dd>{text(value)}</dd></div>" for what, value in values.items())
    return f'<dl class="vg-numbers">{cells}</dl>'


def speed(seconds: float, tokens: int, counts: Sequence[int], pictures: int = 1) -> dict[str, str]:
    """Elapsed time, tokens per second and tokens per pass of a drawing under way; `tokens` are one picture's."""
    passes = len(counts)
    return {
        "seconds": f"{seconds:.1f}",
        "tokens per second": f"{tokens * pictures / seconds:.0f}" if seconds > 0 else "–",
        "tokens per pass": f"{tokens / passes:.2f}" if passes else "–",
        "passes": str(passes),
    }


@dataclass(frozen=True)
class Lane:
    """One method of a race, or one picture of a strip, as it is shown.

    Attributes:
        name: shown above the picture.
        tag: beside the name, such as "exact".
        image: the picture, a preview, or None.
        caption: below the picture.
        badge: a remarkable fact, such as "identical picture".
        drawn: tokens so far, of `total`.
        seconds, tokens_per_pass: 0 where not known yet.
    """

    name: str
    tag: str
    image: Image.Image | bytes | None
    caption: str
    badge: str
    drawn: int
    total: int
    seconds: float
    tokens_per_pass: float


def lanes(shown: Sequence[Lane], prompt: str) -> str:
    """Pictures side by side."""
    cells = []
    for lane in shown:
        badge = f'<strong class="vg-badge">✓ {text(lane.badge)}</strong>' if lane.badge else ""
        tag = f'<span class="vg-tag">{text(lane.tag)}</span>' if lane.tag else ""
        cells.append(
            f"<figure><figcaption><b>{text(lane.name)}</b>{tag}</figcaption>"
            f"{picture(lane.image, f'{prompt}, drawn by {lane.name}')}"
            f"{progress(lane.drawn, lane.total)}<p>{text(lane.caption)}</p>{badge}</figure>"
        )
    return f'<div class="vg-lanes">{"".join(cells)}</div>'


def chart(shown: Sequence[Lane], first: str = "method") -> str:
    """Seconds and tokens per pass of each lane, as a table whose cells are bars."""
    longest = max((lane.seconds for lane in shown), default=0) or 1
    most = max((lane.tokens_per_pass for lane in shown), default=0) or 1
    rows = "".join(
        f'<tr><th scope="row">{text(lane.name)}</th>{_bar(lane.seconds / longest, f"{lane.seconds:.2f} s", "a")}'
        f"{_bar(lane.tokens_per_pass / most, f'{lane.tokens_per_pass:.2f}', 'b')}</tr>"
        for lane in shown
    )
    return (
        f'<table class="vg-chart"><thead><tr><th scope="col">{text(first)}</th><th scope="col">seconds, less is faster</th>'
        f'<th scope="col">tokens per pass, more is better</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _bar(share: float, label: str, kind: str) -> str:
    return f'<td><div class="vg-bar vg-{kind}"><i style="--share:{share:.3f}"></i><span>{text(label)}</span></div></td>'


def note(message: str, kind: str = "") -> str:
    """One line that screen readers speak when it changes."""
    return f'<p class="vg-note {kind}" role="status" aria-live="polite">{text(message)}</p>'


def hint(message: str) -> str:
    """A line that explains what stands above it."""
    return f'<p class="vg-hint">{text(message)}</p>'

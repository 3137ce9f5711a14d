"""What the page shows of a drawing, as HTML: pictures, the token map, progress, comparisons. Pure functions.

Everything that a person may have typed goes through `text`. Nothing is told by colour alone.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


def stage(images: Sequence[Image.Image | bytes | None], alt: str) -> str:
    """One to four pictures, as large as they fit."""
    cells = "".join(picture(image, alt if len(images) == 1 else f"{alt}, picture {k}") for k, image in enumerate(images, 1))
    return f'<div class="vg-stage vg-n{len(images)}">{cells}</div>'


def token_map(counts: Iterable[int], side: int) -> str:
    """The grid of tokens in drawing order, one pill per pass, as long as the tokens that the pass committed."""
    parts, position, passes, total = [], 0, 0, side * side
    for count in counts:
        passes += 1
        count = min(count, total - position)
        if count < 1:
            continue
        shade = min(count, _LEVELS)
        body = []
        for first, last in _by_row(position, position + count, side):
            x, y, width = first % side * _CELL, first // side * _CELL, (last - first) * _CELL
            body.append(f'<rect x="{x + 1.5}" y="{y + 1.5}" width="{width - 3}" height="{_CELL - 3}" rx="6"/>')
        if count > 1:
            across, down = position % side * _CELL + _CELL / 2, position // side * _CELL + _CELL / 2
            body.append(f'<text x="{across}" y="{down}">{count}</text>')
        plural = "s" if count > 1 else ""
        parts.append(f'<g class="k{shade}"><title>pass {passes}: {count} token{plural}</title>{"".join(body)}</g>')
        position += count
    half = _CELL / 2
    rest = "".join(
        f'<circle class="u" cx="{p % side * _CELL + half}" cy="{p // side * _CELL + half}" r="1.6"/>'
        for p in range(position, total)
    )
    label = f"Token map: {position} of {total} tokens drawn in {passes} passes"
    size = side * _CELL
    return f'<svg class="vg-map" viewBox="0 0 {size} {size}" role="img" aria-label="{label}">{"".join(parts)}{rest}</svg>'


def _by_row(first: int, last: int, side: int) -> Iterable[tuple[int, int]]:
    while first < last:
        end = min(last, (first // side + 1) * side)
        yield first, end
        first = end


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

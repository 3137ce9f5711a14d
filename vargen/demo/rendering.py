"""HTML of the results on the page: images, the token map, progress and comparisons. Pure functions.

All text that may come from a user goes through `text`. No information is conveyed by color alone.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

_CELL = 20  # SVG units per token of the map
_LEVELS = 8  # shades; larger counts of accepted tokens share the last
# What methods are called before their name where visitors meet them first, and what they do. A step is a pass of the network.
PLAIN_NAMES = {"ar": "Slow", "plain": "Slow", "gumbel": "Fast", "auto": "Fast", "code": "Fast"}
PLAIN_WORDS = {
    "ar": "one token per step",
    "gumbel": "several tokens per step",
    "auto": "several tokens per step",
    "gsd": "also accepts similar tokens",
    "plain": "one scale per step",
    "code": "fine scales by a smaller model",
}


def text(value: object) -> str:
    """Escape any text as inert HTML, also for the template languages that Gradio applies to it."""
    return html.escape(str(value)).translate({ord("{"): "&#123;", ord("}"): "&#125;", ord("$"): "&#36;", ord("`"): "&#96;"})


def plain_name(method: str) -> str:
    """Return what a method is called, with its name: "Fast (gumbel)"; its name alone if it has no other."""
    return f"{PLAIN_NAMES[method]} ({method})" if method in PLAIN_NAMES else method


def image_tag(image: Image.Image | bytes | None, alt: str) -> str:
    """Return an `<img>` with inline data: finished images as PNG, previews unchanged; None gives an empty frame."""
    if image is None:
        return f'<div class="vg-image" role="img" aria-label="{text(alt)}"></div>'
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, format="PNG")
        image = file.getvalue()
    kind = "png" if image.startswith(b"\x89PNG") else "webp"
    data = base64.b64encode(image).decode()
    return f'<img class="vg-image" alt="{text(alt)}" src="data:image/{kind};base64,{data}">'


def image_grid(images: Sequence[Image.Image | bytes | None], alt: str, captions: Sequence[str] = (), link: str = "") -> str:
    """Show images as large as they fit, each with its caption if there is one; `link` generates finished ones again."""
    cells = [image_tag(image, alt if len(images) == 1 else f"{alt}, image {k}") for k, image in enumerate(images, 1)]
    if captions:
        pairs = zip(cells, captions, strict=True)
        cells = [f"<figure>{cell}<figcaption>{text(caption)}</figcaption></figure>" for cell, caption in pairs]
    return f'<div class="vg-stage vg-n{min(len(images), 5)}" data-link="{text(link)}">{"".join(cells)}</div>'


def share_buttons(link: str, kind: str = "image", name: str = "", file: str = "") -> str:
    """Show the buttons that page.js connects: one saves what is above them, one copies its link. Reserves their place without.

    Args:
        link: empty if none generates this again. name: of the saved file; empty for nothing to save. file: its address, if it
            is not that of the image above.
    """
    save = f'<button type="button" class="vg-save" data-name="{text(name)}" data-file="{text(file)}">Save {kind}</button>'
    copy = f'<button type="button" class="vg-copy" data-link="{text(link)}">Copy link to share</button>'
    return f'<div class="vg-share">{save if name else ""}{copy if link else ""}</div>'


def score_caption(record: dict[str, Any]) -> str:
    """Format the scores in an image's record of `DecodeStats` as a caption; empty without scores."""
    if "score" not in record:
        return ""
    others = sorted((each for each in record.get("candidates", ())), reverse=True)[1:]
    beside = f", better than {', '.join(f'{each:.1f}' for each in others)}" if others else ""
    return f"match with the prompt {record['score']:.1f}{beside}"


def token_map(counts: Iterable[int], grids: Sequence[tuple[int, int]]) -> str:
    """Show the tokens in generation order, one bar per pass, whose length is the number of tokens that the pass committed.

    Args:
        grids: rows and columns of each grid of tokens; an image has one grid, or one per scale.
    """
    rows, width, height = _layout_cells(grids)
    parts, position, passes, total = [], 0, 0, sum(columns for *_, columns in rows)
    for count in counts:
        passes += 1
        count = min(count, total - position)
        if count < 1:
            continue
        bars = "".join(
            f'<rect x="{x + 1.5}" y="{y + 1.5}" width="{wide - 3}" height="{_CELL - 3}" rx="6"/>'
            for x, y, wide in _pieces(rows, position, position + count)
        )
        plural = "s" if count > 1 else ""
        parts.append(f'<g class="k{min(count, _LEVELS)}"><title>step {passes}: {count} token{plural}</title>{bars}</g>')
        position += count
    half = _CELL / 2
    rest = "".join(
        f'<circle class="u" cx="{x + cell + half}" cy="{y + half}" r="1.6"/>'
        for x, y, wide in _pieces(rows, position, total)
        for cell in range(0, wide, _CELL)
    )
    label = f"Token map: {position} of {total} tokens generated in {passes} passes"
    return f'<svg class="vg-map" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}{rest}</svg>'


def _layout_cells(grids: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int, int]], int, int]:
    """Return x, y and columns of each row of tokens in generation order, and the width and height of the map.

    Grids are placed side by side, one cell apart, and wrap at twice the width of the widest grid.
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
    """Yield the segments of the tokens from `first` up to but not including `last`: x, y and width, one per row."""
    start = 0
    for x, y, columns in rows:
        begin, end = max(first, start), min(last, start + columns)
        if begin < end:
            yield x + (begin - start) * _CELL, y, (end - begin) * _CELL
        start += columns


def progress(done: int, total: int, seconds: float = 0.0) -> str:
    """Show the share of tokens generated and, if `seconds` of an active run are given, the expected seconds left."""
    left = f", {seconds * (total - done) / done:.1f} s left" if seconds and 0 < done < total else ""
    return (
        f'<div class="vg-progress" title="{done} of {total} tokens"><progress max="{total}" value="{done}" '
        f'aria-label="tokens generated"></progress><span>{100 * done // total}%{left}</span></div>'
    )


def numbers(values: dict[str, str]) -> str:
    """Show labeled values in a row."""
    cells = "".join(f"<div><dt>{text(what)}</dt><dd>{text(value)}</dd></div>" for what, value in values.items())
    return f'<dl class="vg-numbers">{cells}</dl>'


def speed(seconds: float, tokens: int, counts: Sequence[int], num_images: int = 1) -> dict[str, str]:
    """Return passes, tokens per pass and tokens per second of an active run; `tokens` counts those of one image."""
    passes = len(counts)
    return {
        "steps": str(passes),
        "tokens per step": f"{tokens / passes:.2f}" if passes else "–",
        "tokens per second": f"{tokens * num_images / seconds:.0f}" if seconds > 0 else "–",
    }


@dataclass(frozen=True)
class ResultCard:
    """One method of a race, or one image of a strip, for display.

    Attributes:
        name: shown above the image.
        tag: below the name, such as "exact".
        image: the image, a preview, or None.
        caption: below the image.
        badge: a highlight, such as "same image as ar".
        done: tokens so far, out of `total`.
        seconds, tokens_per_pass: 0 if not known yet. finished: whether they are final.
    """

    name: str
    tag: str
    image: Image.Image | bytes | None
    caption: str
    badge: str
    done: int
    total: int
    seconds: float
    tokens_per_pass: float
    finished: bool = False


def result_cards(cards: Sequence[ResultCard], prompt: str) -> str:
    """Show images side by side."""
    cells = []
    for card in cards:
        badge = f'<strong class="vg-badge">✓ {text(card.badge)}</strong>' if card.badge else ""
        words = ", ".join(filter(None, [PLAIN_WORDS.get(card.name, ""), card.tag]))
        cells.append(
            f"<figure><figcaption><b>{text(plain_name(card.name))}</b><span>{text(words)}</span></figcaption>"
            f"{image_tag(card.image, f'{prompt}, by {card.name}')}"
            f"{progress(card.done, card.total)}<p>{text(card.caption)}</p>{badge}</figure>"
        )
    return f'<div class="vg-lanes">{"".join(cells)}</div>'


def chart(cards: Sequence[ResultCard], first: str = "method") -> str:
    """Show seconds and tokens per pass of each finished card, as a table with bars as cells: others are not comparable yet."""
    finished = [card for card in cards if card.finished]
    longest = max((card.seconds for card in finished), default=0) or 1
    most = max((card.tokens_per_pass for card in finished), default=0) or 1
    rows = "".join(
        f'<tr><th scope="row">{text(plain_name(card.name))}</th>{_bar(card.seconds / longest, f"{card.seconds:.2f} s", "a")}'
        f"{_bar(card.tokens_per_pass / most, f'{card.tokens_per_pass:.2f}', 'b')}</tr>"
        if card.finished
        else f'<tr><th scope="row">{text(plain_name(card.name))}</th>'
        f"<td>{'running' if card.seconds else 'waiting'}</td><td></td></tr>"
        for card in cards
    )
    return (
        f'<table class="vg-chart"><thead><tr><th scope="col">{text(first)}</th><th scope="col">seconds, less is faster</th>'
        f'<th scope="col">tokens per step, more is better</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _bar(share: float, label: str, kind: str) -> str:
    return f'<td><div class="vg-bar vg-{kind}"><i style="--share:{share:.3f}"></i><span>{text(label)}</span></div></td>'


def status_line(message: str, kind: str = "") -> str:
    """Show a status line that screen readers announce when it changes."""
    return f'<p class="vg-note {kind}" role="status" aria-live="polite">{text(message)}</p>'


def hint(message: str, more: str = "") -> str:
    """Show a line that explains the element above it; `more` is shown where a pointer rests on it."""
    title = f' title="{text(more)}"' if more else ""
    return f'<p class="vg-hint"{title}>{text(message)}</p>'


def block_badges(rows: Iterable[Any]) -> str:
    """Show a badge for each block of a video: the model that generated it, its score, and its time."""
    cells = []
    for row in rows:
        score = "" if row.score is None else f" · {row.score:.1f}"
        trouble = f" · {row.failure}" if row.failure else ""
        title = f"block {row.number}: {row.outcome}{trouble}"
        kind = "draft" if row.source == "draft" else "target"
        cells.append(
            f'<span class="vg-block vg-{kind}" role="listitem" title="{text(title)}">'
            f"{row.number} {text(row.source)}{score} · {1e3 * row.seconds:.0f} ms</span>"
        )
    legend = '<p class="vg-hint">Solid: the large model. Dashed: the small model, with its score.</p>' if cells else ""
    return f'<div class="vg-blocks" role="list">{" ".join(cells)}</div>{legend}'

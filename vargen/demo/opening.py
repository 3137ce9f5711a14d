"""What the page opens on: a race replayed from a recording, and a wall of images and videos that were generated before."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any

from vargen.demo.inputs import SPEEDS

FOLDER = Path(__file__).with_name("recordings")
SCRIPT = Path(__file__).with_name("race.js")
_VIDEO_EVERY = 4  # place of the videos among the images
_SLOWDOWN = 4  # the replay takes this many times as long as the recorded run


def text(value: object) -> str:
    """Escape any text as inert HTML, also for the template language that gradio applies to it."""
    return html.escape(str(value)).translate({ord("{"): "&#123;", ord("}"): "&#125;", ord("$"): "&#36;"})


def read_wall(modes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return mode, prompt, seed and file of each tile whose mode the page has, with the videos spread among the images."""
    tiles = json.loads((FOLDER / "wall.json").read_text("utf-8"))
    videos = [each for each in tiles if each["mode"] == "video" and "video" in modes]
    mixed: list[dict[str, Any]] = []
    for number, tile in enumerate(each for each in tiles if each["mode"] == "image"):
        mixed.append(tile)
        if number % _VIDEO_EVERY == 1 and videos:
            mixed.append(videos.pop(0))
    return [*mixed, *videos]


def render_race() -> str:
    """Return the race as HTML: race.js uncovers the finished image in both lanes as fast as the passes did."""
    race = json.loads((FOLDER / "race.json").read_text("utf-8"))
    slow, fast = race["lanes"]
    ratio = slow["seconds"][-1] / fast["seconds"][-1]
    subject = race["prompt"].partition(",")[0]
    image = f"data:image/png;base64,{base64.b64encode((FOLDER / 'race.png').read_bytes()).decode()}"
    data = text(json.dumps({"slowdown": _SLOWDOWN, "lanes": [fast, slow]}))
    return (
        f'<section class="vg-replay" data-race="{data}" aria-label="Example, replayed from a recording">'
        f'<div class="vg-pitch"><p class="vg-example">Example: {text(subject)}</p>'
        f"<h2>The same image,<br> {ratio:.1f} times as fast.</h2>"
        f"<p>{len(fast['tokens'])} steps instead of {len(slow['tokens'])}: "
        f"{fast['seconds'][-1]:.1f} seconds instead of {slow['seconds'][-1]:.1f}.</p>"
        f'<p class="vg-small">Recorded in float32 on one CPU core, shown in slow motion.</p></div>'
        f"{''.join(_render_lane(lane, subject, image) for lane in (fast, slow))}</section>"
    )


def _render_lane(lane: dict[str, Any], subject: str, image: str) -> str:
    name, meaning = SPEEDS[lane["method"]]
    return (
        f'<figure class="vg-lane" title="Method {text(lane["method"])}: {text(meaning)}"><figcaption><b>{name}</b> '
        f'<span class="vg-seconds">{lane["seconds"][-1]:.2f}</span> s'
        f'<small><span class="vg-passes">{len(lane["tokens"])}</span> steps</small></figcaption>'
        f'<div class="vg-frame"><img src="{image}" alt="{text(subject)}, {name.lower()}">'
        '<canvas aria-hidden="true"></canvas></div></figure>'
    )

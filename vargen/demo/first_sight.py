"""What the page opens on: a race replayed from a recording, above a wall of images and videos that were generated before.

Both are recorded in the folder `recordings`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vargen.demo.links import link_to
from vargen.demo.rendering import PLAIN_NAMES, PLAIN_WORDS, share_buttons, text
from vargen.demo.request import PageRequest

FOLDER = Path(__file__).with_name("recordings")
ROUTE = "first-sight"  # where the page serves the folder
_VIDEO_EVERY = 4  # place of the videos among the images
_SLOWDOWN = 4  # the replay takes this many times as long as the recorded run


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


def render_wall(modes: tuple[str, ...]) -> str:
    """Return the wall: a button per tile, which page.js lets take prompt and seed over and start the job."""
    tiles = "".join(
        f'<button type="button" class="vg-tile" data-mode="{tile["mode"]}" data-prompt="{text(tile["prompt"])}" '
        f'data-seed="{tile["seed"]}" title="{text(tile["prompt"])}">'
        f'<img src="{ROUTE}/{tile["file"]}" alt="{text(tile["prompt"])}" width="128" height="128" decoding="async">'
        f"{'<i>▶ video</i>' if tile['mode'] == 'video' else ''}"
        f'<span aria-hidden="true">{text(_subject(tile["prompt"]))}</span></button>'
        for tile in read_wall(modes)
    )
    return f'<h2 class="vg-title">More examples: click to generate</h2><div class="vg-wall">{tiles}</div>'


def render_race() -> str:
    """Return the race: page.js replays the passes of both lanes over the finished image, which can be saved and shared."""
    race = json.loads((FOLDER / "race.json").read_text("utf-8"))
    slow, fast = race["lanes"]
    ratio = slow["seconds"][-1] / fast["seconds"][-1]
    lanes = [fast, slow]
    data = text(json.dumps({"slowdown": _SLOWDOWN, "lanes": lanes}))
    subject = _subject(race["prompt"])
    link = link_to(PageRequest(race["prompt"], fast["method"], race["seed"]), {})
    share = share_buttons(link, name=f"vargen-{race['seed']}.png", file=f"{ROUTE}/race.png")
    return (
        f'<section class="vg-replay" data-race="{data}" aria-label="Example, replayed from a recording">'
        f'<div class="vg-pitch"><p class="vg-example">Example: {text(subject)}</p>'
        f"<h2>The same image,<br> {ratio:.1f} times as fast.</h2>"
        f'<p title="A step over several tokens takes longer than one over a single token: the time falls less than the steps.">'
        f"{len(fast['tokens'])} steps instead of {len(slow['tokens'])}: "
        f"{fast['seconds'][-1]:.1f} seconds instead of {slow['seconds'][-1]:.1f}.</p>"
        f'<p class="vg-small">Recorded on one CPU core, shown in slow motion.</p></div>'
        f"{''.join(_render_lane(lane, subject) for lane in lanes)}"
        f'<div class="vg-outcome">{share}<span class="vg-badge">✓ Identical images</span></div></section>'
    )


def _render_lane(lane: dict[str, Any], subject: str) -> str:
    method, name, passes = lane["method"], PLAIN_NAMES[lane["method"]], len(lane["tokens"])
    each = "one patch each" if passes == lane["tokens"][-1] else "a few patches each"
    return (
        f'<figure class="vg-lane" data-method="{text(method)}">'
        f'<figcaption title="Method {text(method)}: {text(PLAIN_WORDS[method])}. '
        'A step is one pass of the network, a token a patch of the image.">'
        f'<b>{name}</b> <span class="vg-clock"><span class="vg-seconds">{lane["seconds"][-1]:.2f}</span> s</span>'
        f'<small><span class="vg-passes">{passes}</span> steps, <span class="vg-each">{each}</span></small></figcaption>'
        f'<div class="vg-frame"><img src="{ROUTE}/race.png" alt="{text(subject)}, {name.lower()}">'
        '<canvas aria-hidden="true"></canvas></div></figure>'
    )


def _subject(prompt: str) -> str:
    """Return a prompt without its style."""
    return prompt.partition(",")[0]

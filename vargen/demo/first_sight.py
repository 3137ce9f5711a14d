"""What the page opens on: a race replayed from a recording, above a wall of images and videos that were generated before.

`python -m recipes first-sight` records both, into the folder `recordings`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vargen.demo.rendering import PLAIN_WORDS, text

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
        f"{'<i>▶ video</i>' if tile['mode'] == 'video' else ''}</button>"
        for tile in read_wall(modes)
    )
    return f'<h2 class="vg-title">Click one: it is generated again, live</h2><div class="vg-wall">{tiles}</div>'


def render_race() -> str:
    """Return the race: page.js replays the passes of both lanes over the finished image."""
    race = json.loads((FOLDER / "race.json").read_text("utf-8"))
    sequential, accelerated = race["lanes"]
    ratio = sequential["seconds"][-1] / accelerated["seconds"][-1]
    lanes = "".join(_render_lane(lane, PLAIN_WORDS[lane["method"]]) for lane in race["lanes"])
    data = text(json.dumps({"slowdown": _SLOWDOWN, "file": f"{ROUTE}/race.webp", "lanes": race["lanes"]}))
    return (
        f'<section class="vg-replay" data-race="{data}" aria-label="Race, replayed from a recording">'
        f'<div class="vg-pitch"><h2>The same image.<br> {ratio:.1f} times as fast.</h2>'
        f"<p><b>{sequential['method']}</b> generates one token per pass of the network. <b>{accelerated['method']}</b> drafts "
        f"several and verifies them at once: {len(accelerated['tokens'])} passes instead of {len(sequential['tokens'])}.</p>"
        f"<p>A pass over several tokens takes longer than a pass over one, so the time falls less than the passes: "
        f"{accelerated['seconds'][-1]:.1f} seconds instead of {sequential['seconds'][-1]:.1f}.</p>"
        f'<p class="vg-small">“{text(race["prompt"])}”, seed {race["seed"]}, on one CPU core, in slow motion.</p>'
        f"</div>{lanes}</section>"
    )


def _render_lane(lane: dict[str, Any], words: str) -> str:
    return (
        f'<figure class="vg-lane" data-method="{text(lane["method"])}"><figcaption><span><b>{text(lane["method"])}</b> '
        f"{text(words)}</span>"
        f'<span class="vg-clock"><b class="vg-passes">{len(lane["tokens"])}</b> passes · '
        f'<span class="vg-seconds">{lane["seconds"][-1]:.2f}</span> s</span></figcaption>'
        f'<div class="vg-frame"><img src="{ROUTE}/race.webp" alt="the finished image, by {text(lane["method"])}">'
        '<canvas aria-hidden="true"></canvas></div>'
        '<p class="vg-result"><span>✓ identical image</span></p></figure>'
    )

"""The Race mode: methods one after the other on one prompt and seed, and whether they generated the same image."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import gradio as gr
import torch
from PIL import Image

from vargen.demo.calls import Progress, generate
from vargen.demo.inputs import SPEEDS, Mode, Shared, Updates, Values, build_methods, plain_name
from vargen.demo.links import make_link
from vargen.demo.opening import text
from vargen.pipelines.base import VisualPipeline

_MOST = 4


@dataclass
class Lane:
    """A method of a race, how far it is, and whether it generated the image of the baseline, if that is known."""

    method: str
    progress: Progress | None = None
    same: bool | None = None

    @property
    def finished(self) -> bool:
        return self.progress is not None and self.progress.result is not None


def build_race_tab(pipe: VisualPipeline, shared: Shared) -> Mode:
    """Lay out the mode. Slow methods start first, so that the others can be compared with them."""
    note = gr.Markdown("One prompt and seed, one method after the other. Press Race.", elem_id="race-note")
    track = gr.HTML(elem_id="track")
    with gr.Accordion("Who races", open=False, elem_id="who"):
        chosen = build_methods(pipe, "racers", multiselect=True, max_choices=_MOST)

    def run(values: Values) -> Iterator[Updates]:
        prompt, seed = shared.read_prompt(values), int(values[shared.seed])
        methods = values[chosen]
        if not 2 <= len(methods) <= _MOST:
            raise ValueError(f"Choose two to {_MOST} methods, not {len(methods)}.")
        sampling = shared.read_sampling(values, pipe)
        lanes = [Lane(name) for name in sorted(methods, key=lambda name: name != pipe.baseline)]
        for lane in lanes:
            for progress in generate(pipe, prompt, [seed], accelerator=lane.method, **sampling):
                lane.progress = progress or lane.progress
                yield {track: render_lanes(lanes, prompt, pipe.num_tokens), note: f"{plain_name(lane.method)} …"}
            if lane is not lanes[0] and lanes[0].method == pipe.baseline:
                lane.same = is_same(lanes[0], lane)
        link = make_link("race", prompt, seed, ",".join(methods), shared.read_values(values), pipe.default_sampling)
        yield {track: render_lanes(lanes, prompt, pipe.num_tokens), note: describe_race(lanes), shared.link: link}

    def select(names: str) -> Updates:
        for name in names.split(","):
            pipe.validate_method(name)
        return {chosen: names.split(",")}

    return Mode("Race", run, [chosen], [track, note], note, select)


def is_same(one: Lane, other: Lane) -> bool:
    """Whether two finished lanes hold the same image, token for token."""
    assert one.progress is not None and other.progress is not None
    return torch.equal(one.progress.result.tokens, other.progress.result.tokens)


def describe_race(lanes: Sequence[Lane]) -> str:
    """Return who was first, and who generated the same image, in a line."""
    first = min(lanes, key=lambda lane: lane.progress.seconds if lane.progress else 0.0)
    same = [plain_name(lane.method) for lane in lanes if lane.same]
    seconds = first.progress.seconds if first.progress else 0.0
    line = f"**{plain_name(first.method)} was first: {seconds:.2f} seconds.**"
    return f"{line} {' and '.join(same)} gave the same image as {plain_name(lanes[0].method)}." if same else line


def render_lanes(lanes: Sequence[Lane], prompt: str, total: int) -> str:
    """Show each lane's image, its time as a bar beside the longest, and a badge on the image that is the first lane's."""
    longest = max((lane.progress.seconds for lane in lanes if lane.progress and lane.finished), default=0.0)
    return f'<div class="vg-lanes">{"".join(_render_lane(lane, lanes[0], prompt, total, longest) for lane in lanes)}</div>'


def _render_lane(lane: Lane, first: Lane, prompt: str, total: int, longest: float) -> str:
    progress, meaning = lane.progress, SPEEDS.get(lane.method, ("", ""))[1]
    if progress is None:
        image, caption = '<div class="vg-image"></div>', "waiting"
    else:
        image = f'<img class="vg-image" alt="{text(prompt)}, by {text(lane.method)}" src="{_inline(progress.images[0])}">'
        caption = f"{progress.seconds:.2f} s, {progress.passes} steps"
    bar = f'<progress max="{total}" value="{progress.tokens if progress else 0}" aria-label="tokens generated"></progress>'
    if progress and lane.finished:
        bar = f'<i class="vg-bar" style="--share:{progress.seconds / (longest or 1):.3f}"></i>'
        if lane is not first and first.progress:
            caption += f", {first.progress.seconds / (progress.seconds or 1):.1f} times as fast"
    badge = f'<strong class="vg-badge">✓ Same image as {text(SPEEDS[first.method][0])}</strong>' if lane.same else ""
    caption_above = f"<b>{text(plain_name(lane.method))}</b><small>{text(meaning)}</small>"
    return f"<figure><figcaption>{caption_above}</figcaption>{image}{bar}<p>{caption}</p>{badge}</figure>"


def _inline(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

"""The Video tab: plays a video during generation, with a badge for each block and an adjustable threshold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr
import numpy as np

from vargen.decoding import VideoStats
from vargen.demo import rendering
from vargen.demo.inputs import Inputs, build_method_list
from vargen.demo.jobs import INSTANT_EVENT, QUEUED_EVENT, START, JobRegistry, Ticket, stream_job
from vargen.demo.request import new_seed
from vargen.demo.video_service import MAX_TAU, MIN_TAU, VideoService, encode_animation

_IDLE = "Press Generate. During generation, the slider sets the threshold of the blocks that follow."
_EXAMPLES = ("winking face", "beating heart", "waving hand", "face with rolling eyes")
_MAX_BLOCKS = 64


@dataclass(frozen=True)
class VideoControls:
    """The components that start and control a video."""

    method: gr.Dropdown
    num_blocks: gr.Slider
    start: gr.Button
    stop: gr.Button
    tau: gr.Slider


def build_video_controls(service: VideoService, prefix: str = "") -> VideoControls:
    """Lay out the controls; `prefix` starts their ids."""
    summaries = {each.name: each.summary for each in service.methods}
    methods = build_method_list(
        gr.Dropdown, service.methods, lambda each: each.name, f"{prefix}more-methods",
        value=service.default_method, label="Method", filterable=False, elem_id=f"{prefix}method",
    )  # fmt: skip
    summary = gr.HTML(rendering.hint(summaries[service.default_method]), elem_id=f"{prefix}summary", padding=True)
    methods.choice.change(lambda name: rendering.hint(summaries.get(name, "")), methods.choice, summary, **INSTANT_EVENT)
    default = min(_MAX_BLOCKS, int(service.pipe.setting("num_blocks")))
    num_blocks = gr.Slider(1, _MAX_BLOCKS, value=default, step=1, label="Blocks", elem_id=f"{prefix}blocks")
    with gr.Row(elem_classes="vg-pair"):
        start = gr.Button("Generate", variant="primary", elem_id=f"{prefix}make", elem_classes=START, min_width=80)
        stop = gr.Button("Stop", variant="stop", elem_id=f"{prefix}stop", min_width=80)
    # Last, so that it is next to the video on a narrow screen: it is adjusted during playback.
    tau = gr.Slider(
        MIN_TAU, MAX_TAU, value=service.default_tau, step=0.1, label="Score that a draft needs (tau)", elem_id=f"{prefix}tau"
    )  # fmt: skip
    in_range = tau.preprocess
    # While the field is empty during typing, the slider reports None.
    tau.preprocess = lambda level: None if level is None else in_range(level)
    return VideoControls(methods.choice, num_blocks, start, stop, tau)


def output_components(prefix: str = "") -> list[gr.HTML]:
    """Lay out the status line, the video and the badges."""
    note = gr.HTML(rendering.status_line(_IDLE, "off"), elem_id=f"{prefix}note")
    stage = gr.HTML(rendering.image_grid([None], "an empty frame"), elem_id=f"{prefix}stage")
    return [note, stage, gr.HTML(rendering.block_badges([]), elem_id=f"{prefix}badges")]


def connect_events(
    service: VideoService,
    registry: JobRegistry,
    inputs: tuple[gr.Textbox, gr.Number, gr.Checkbox | None],
    controls: VideoControls,
    outputs: list[gr.HTML],
    queue_options: dict[str, Any],
) -> Any:
    """Connect the events.

    Args:
        inputs: prompt, seed, and the checkbox that keeps the seed; without one it is always kept.

    Returns:
        a function that adds another event that starts a video.
    """
    prompt, seed, lock = inputs
    ticket = gr.Textbox(visible=False)

    def start_clicked(request: gr.Request, keep_seed: bool) -> list[Any]:
        return [registry.enqueue(request.session_hash or "", "video"), gr.skip() if keep_seed else new_seed()]

    def run(number: str, ticket: Ticket, words: str, name: str, level: float, count: int, start: int) -> Iterator[list[Any]]:
        yield [rendering.status_line(f"Generating “{words}” by {name} …"), gr.skip(), rendering.block_badges([])]
        rows: list[Any] = []
        frames = np.zeros((0, 1, 1, 3), np.uint8)
        for block, frames in service.generate(number, words, int(start or 0), int(count), name, float(level)):
            rows.append(block.record)
            if ticket.stop.is_set():
                service.stop(number)
            alt = f"{words}, {len(frames)} frames"
            shown = rendering.image_grid([encode_animation(frames, service.pipe.fps)], alt)
            yield [gr.skip(), shown, rendering.block_badges(rows)]
        stats = VideoStats(name, int(start or 0), rows, sum(each.seconds for each in rows))
        stats.stopped = len(rows) < int(count)
        yield [rendering.status_line(summarize(stats, len(frames), service.pipe.fps)), gr.skip(), gr.skip()]

    def run_job(number: str, *values: Any) -> Iterator[list[Any]]:
        yield from stream_job(registry, number, lambda each: run(number, each, *values))

    def stop_clicked(number: str) -> None:
        registry.stop(number)
        service.stop(number)

    def update_tau(number: str, level: float | None) -> None:
        if level is not None:
            service.set_tau(number, float(level))

    keep_seed = gr.State(True) if lock is None else lock
    values = [ticket, prompt, controls.method, controls.tau, controls.num_blocks, seed]

    def start_on(event: Any) -> None:
        started = event(start_clicked, keep_seed, [ticket, seed], trigger_mode="once", **QUEUED_EVENT)
        started.success(run_job, values, outputs, show_progress="hidden", **queue_options)

    start_on(controls.start.click)
    controls.tau.input(update_tau, [ticket, controls.tau], None, **INSTANT_EVENT)
    controls.stop.click(stop_clicked, ticket, None, **INSTANT_EVENT)
    return start_on


def summarize(stats: VideoStats, frames: int, fps: float) -> str:
    """Summarize a finished video in one line."""
    share = "" if stats.acceptance is None else f", {100 * stats.acceptance:.0f} % of the drafts accepted"
    failed = f" {len(stats.failures)} scores failed: {stats.failures[0]}." if stats.failures else ""
    done = "Stopped after" if stats.stopped else "Generated"
    return f"{done} {frames} frames ({frames / fps:.1f} s) in {stats.seconds:.1f} s{share}.{failed}"


def build_video_tab(service: VideoService, registry: JobRegistry, shared: Inputs, queue_options: dict[str, Any]) -> None:
    """Lay out the tab on the page of an image model, and connect its events."""
    gr.Markdown(
        f"The model {service.name} generates a video block by block: a small network drafts each block, a scorer scores it, "
        "and the large network regenerates blocks that score too low.",
        elem_classes="vg-hint",
    )
    with gr.Row(elem_id="video-examples", elem_classes="vg-examples"):
        for example in _EXAMPLES:
            button = gr.Button(example, size="sm", min_width=0, elem_classes="example")
            button.click(None, None, shared.prompt, js=f"() => {json.dumps(example)}", api_visibility="private")
    controls = build_video_controls(service, "video-")
    inputs = (shared.prompt, shared.seed, shared.lock)
    connect_events(service, registry, inputs, controls, output_components("video-"), queue_options)

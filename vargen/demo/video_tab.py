"""The Video mode: plays a video during generation, with a badge for each block and an adjustable threshold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr
import numpy as np

from vargen.decoding import VideoStats
from vargen.demo import rendering
from vargen.demo.inputs import Subject
from vargen.demo.jobs import INSTANT_EVENT, JobControls, JobRegistry, Ticket, connect_job
from vargen.demo.links import link_to
from vargen.demo.method_lists import build_method_list
from vargen.demo.request import PageRequest
from vargen.demo.video_service import MAX_TAU, MIN_TAU, VideoService, encode_animation

EXAMPLE = "waving hand"
_FILE = "vargen.webp"
_EXAMPLES = ("winking face", "beating heart", "waving hand", "horse")
_MAX_BLOCKS = 64


def build_video_tab(service: VideoService, registry: JobRegistry, subject: Subject, queue_options: dict[str, Any]) -> None:
    """Lay out the mode and connect its events."""
    with gr.Row(elem_id="video-examples", elem_classes="vg-examples"):
        for example in _EXAMPLES:
            button = gr.Button(example, size="sm", min_width=0, elem_classes="example")
            button.click(None, None, subject.prompt, js=f"() => {json.dumps(example)}", api_visibility="private")
    note = gr.HTML(rendering.status_line("", "off"), elem_id="video-note")
    with gr.Row(elem_id="video-columns"):
        with gr.Column(scale=2, min_width=240):
            stage = gr.HTML(_render_stage([None], "an empty frame"), elem_id="video-stage")
        with gr.Column(scale=3, min_width=240):
            # Beside the video, because it is adjusted during playback.
            tau = gr.Slider(
                MIN_TAU, MAX_TAU, value=service.default_tau, step=0.1, label="Score that a draft needs (tau)",
                info="Move it while the video is generated: it counts from then on.", elem_id="video-tau",
            )  # fmt: skip
            badges = gr.HTML(rendering.block_badges([]), elem_id="video-badges")
    with gr.Accordion("Method and length", open=False, elem_id="video-options"):
        methods = build_method_list(
            gr.Radio, service.methods, service.default_method, "Method", elem_id="video-method",
            elem_classes="methods",
        )  # fmt: skip
        default = min(_MAX_BLOCKS, int(service.pipe.setting("num_blocks")))
        num_blocks = gr.Slider(1, _MAX_BLOCKS, value=default, step=1, label="Blocks", elem_id="video-blocks")
    in_range = tau.preprocess
    # While the field is empty during typing, the slider reports None.
    tau.preprocess = lambda level: None if level is None else in_range(level)

    def check(words: str, style: str, seed: int, name: str, *_: Any) -> str:
        return link_to(PageRequest(words, name, seed), {}, "video")

    def run(ticket: Ticket, words: str, style: str, seed: int, name: str, level: float, count: int) -> Iterator[list[Any]]:
        yield [rendering.status_line(f"Generating “{words}” by {name} …"), gr.skip(), rendering.block_badges([])]
        rows: list[Any] = []
        frames, clip, alt = np.zeros((0, 1, 1, 3), np.uint8), None, "an empty frame"
        for block, frames in service.generate(ticket, words, int(seed), int(count), name, float(level)):
            rows.append(block.record)
            if ticket.stop.is_set():
                service.stop(ticket)
            alt, clip = f"{words}, {len(frames)} frames", encode_animation(frames, service.pipe.fps)
            yield [gr.skip(), _render_stage([clip], alt), rendering.block_badges(rows)]
        stats = VideoStats(name, int(seed), rows, sum(each.seconds for each in rows))
        stats.stopped = len(rows) < int(count)
        link = "" if stats.stopped else check(words, style, seed, name)
        stage = _render_stage([clip], alt, link)
        yield [rendering.status_line(summarize(stats, len(frames), service.pipe.fps)), stage, gr.skip()]

    def update_tau(number: str, level: float | None) -> None:
        if level is not None and (ticket := registry.find(number)) is not None:
            service.set_tau(ticket, float(level))

    def stop(number: str) -> None:
        if (ticket := registry.find(number)) is not None:
            service.stop(ticket)

    controls = JobControls(note, [methods.choice, tau, num_blocks], [stage, badges])
    ticket = connect_job(registry, subject, "video", controls, check, run, queue_options, stop)
    tau.input(update_tau, [ticket, tau], None, **INSTANT_EVENT)


def _render_stage(images: Sequence[bytes | None], alt: str, link: str = "") -> str:
    """Show a video with what saves and shares it once it is whole."""
    return rendering.image_grid(images, alt) + rendering.share_buttons(link, "video", _FILE if link else "")


def summarize(stats: VideoStats, frames: int, fps: float) -> str:
    """Summarize a finished video in one line."""
    share = "" if stats.acceptance is None else f", {100 * stats.acceptance:.0f} % of the drafts accepted"
    failed = f" {len(stats.failures)} scores failed: {stats.failures[0]}." if stats.failures else ""
    done = "Stopped after" if stats.stopped else "Generated"
    return f"{done} {frames} frames ({frames / fps:.1f} s) in {stats.seconds:.1f} s{share}.{failed}"

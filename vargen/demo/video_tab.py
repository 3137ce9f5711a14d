"""The video tab: plays a video during generation, with a badge for each block and an adjustable threshold."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr
import numpy as np
import torch
from PIL import Image

from vargen.decoding import VideoBlock, VideoMethod, VideoStats, resolve_method
from vargen.demo import inputs
from vargen.demo import rendering as figures
from vargen.demo.jobs import Runs, told_plainly

_IDLE = "Press Make. While the video is made, the slider moves the threshold for the blocks that follow."
_EXAMPLES = ("winking face", "beating heart", "waving hand", "face with rolling eyes")
_MOST_BLOCKS = 64
_TAU = (-10.0, 10.0)


class VideoEngine:
    """A loaded video pipeline and its active videos, by ticket.

    Args:
        pipe: a video pipeline, on its device. name: display name of the model. scorer: routes drafts; None for the packaged
            one.
    """

    def __init__(self, pipe: Any, name: str, scorer: Any = None):
        self.pipe, self.name, self.scorer = pipe, name, scorer
        self.methods = [each for each in pipe.methods() if each.reason is None]
        self._streams: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def default_method(self) -> str:
        return str(self.pipe.chosen(None).name)

    @property
    def default_tau(self) -> float:
        """The initial value of the slider."""
        tau = self.pipe.chosen(None).threshold
        return 0.0 if tau is None else min(_TAU[1], max(_TAU[0], tau))

    def make(
        self, ticket: str, prompt: str, seed: int, blocks: int, method: str, tau: float
    ) -> Iterator[tuple[VideoBlock, Any]]:
        """Yield each finished block with all frames of the video so far, as uint8 `[F, Y, X, 3]`.

        Raises:
            ValueError: as a call of the pipeline.
        """
        threshold = tau if resolve_method(method, VideoMethod.paradigm).threshold is not None else None
        stream = self.pipe.stream(
            prompt, num_blocks=blocks, accelerator=method, tau=threshold, scorer=self.scorer,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        with self._lock:
            self._streams[ticket] = stream
        frames = []
        try:
            for block in stream:
                frames.append(block.frames.mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy())
                yield block, np.concatenate(frames)
        finally:
            with self._lock:
                self._streams.pop(ticket, None)
            stream.close()

    def set_tau(self, ticket: str, tau: float) -> bool:
        """Change the threshold of an active video; False if the video has none."""
        with self._lock:
            stream = self._streams.get(ticket)
        if stream is None or stream.tau is None:
            return False
        stream.tau = tau
        return True

    def stop(self, ticket: str) -> None:
        """Stop a video within one pass."""
        with self._lock:
            stream = self._streams.get(ticket)
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """Stop all videos."""
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.cancel()


def animation(frames: Any, fps: float) -> bytes:
    """Encode uint8 `[F, Y, X, 3]` as a looping WebP."""
    pictures = [Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    pictures[0].save(file, "WEBP", save_all=True, append_images=pictures[1:], duration=round(1000 / fps), loop=0, quality=90)
    return file.getvalue()


def badges(rows: list[Any]) -> str:
    """Show a badge for each block: the model that generated it, its score, and its time."""
    cells = []
    for row in rows:
        score = "" if row.score is None else f" · {row.score:.1f}"
        trouble = f" · {row.failure}" if row.failure else ""
        title = f"block {row.number}: {row.outcome}{trouble}"
        kind = "draft" if row.source == "draft" else "target"
        cells.append(
            f'<span class="vg-block vg-{kind}" role="listitem" title="{figures.text(title)}">'
            f"{row.number} {figures.text(row.source)}{score} · {1e3 * row.seconds:.0f} ms</span>"
        )
    return f'<div class="vg-blocks" role="list">{" ".join(cells)}</div>'


def news(stats: VideoStats, frames: int, fps: float) -> str:
    """Summarize a finished video in one line."""
    share = "" if stats.acceptance is None else f", {100 * stats.acceptance:.0f} % of the drafts accepted"
    failed = f" {len(stats.failures)} scores failed: {stats.failures[0]}." if stats.failures else ""
    done = "Stopped after" if stats.stopped else "Made"
    return f"{done} {frames} frames ({frames / fps:.1f} s) in {stats.seconds:.1f} s{share}.{failed}"


@dataclass(frozen=True)
class Controls:
    """The components that start and control a video."""

    method: gr.Dropdown
    blocks: gr.Slider
    go: gr.Button
    stop: gr.Button
    tau: gr.Slider


def controls(engine: VideoEngine, prefix: str = "") -> Controls:
    """Lay out the controls; `prefix` starts their ids."""
    names, told = [each.name for each in engine.methods], {each.name: each.summary for each in engine.methods}
    method = gr.Dropdown(names, value=engine.default_method, label="Method", filterable=False, elem_id=f"{prefix}method")
    summary = gr.HTML(figures.hint(told[engine.default_method]), elem_id=f"{prefix}summary", padding=True)
    method.change(lambda name: figures.hint(told.get(name, "")), method, summary, **inputs.QUICK)
    usual = min(_MOST_BLOCKS, int(engine.pipe.default("num_blocks")))
    blocks = gr.Slider(1, _MOST_BLOCKS, value=usual, step=1, label="Blocks", elem_id=f"{prefix}blocks")
    with gr.Row(elem_classes="vg-pair"):
        go = gr.Button("Make", variant="primary", elem_id=f"{prefix}make", elem_classes=inputs.START, min_width=80)
        stop = gr.Button("Stop", variant="stop", elem_id=f"{prefix}stop", min_width=80)
    # Last, so that it is next to the video on a narrow screen: it is adjusted during playback.
    tau = gr.Slider(
        *_TAU, value=engine.default_tau, step=0.1, label="Score that a draft needs (tau)", elem_id=f"{prefix}tau"
    )  # fmt: skip
    in_range = tau.preprocess
    # While the field is empty during typing, the slider reports None.
    tau.preprocess = lambda level: None if level is None else in_range(level)
    return Controls(method, blocks, go, stop, tau)


def screen(prefix: str = "") -> list[gr.HTML]:
    """Lay out the status line, the video and the badges."""
    note = gr.HTML(figures.note(_IDLE, "off"), elem_id=f"{prefix}note")
    stage = gr.HTML(figures.stage([None], "an empty frame"), elem_id=f"{prefix}stage")
    return [note, stage, gr.HTML(badges([]), elem_id=f"{prefix}badges")]


def wire(
    engine: VideoEngine,
    runs: Runs,
    prompt: gr.Textbox,
    seed: gr.Number,
    own: Controls,
    outputs: list[gr.HTML],
    draw_options: dict[str, Any],
    lock: gr.Checkbox | None = None,
) -> Any:
    """Connect the events.

    Args:
        lock: whether the seed is kept; otherwise each video takes a new one. None: it is always kept.

    Returns:
        a function that adds another event that starts a video.
    """
    ticket = gr.Textbox(visible=False)

    def press(request: gr.Request, kept: bool) -> list[Any]:
        return [runs.begin(request.session_hash or "", "video"), gr.skip() if kept else inputs.new_seed()]

    def draw(number: str, *values: Any) -> Iterator[list[Any]]:
        if (taken := runs.start(number)) is None:
            return
        words, name, level, count, start = values
        stats, frames = None, np.zeros((0, 1, 1, 3), np.uint8)
        try:
            with told_plainly():
                yield [figures.note(f"Making “{words}” by {name} …"), gr.skip(), badges([])]
                rows: list[Any] = []
                for block, frames in engine.make(number, words, int(start or 0), int(count), name, float(level)):
                    rows.append(block.record)
                    if taken.stop.is_set():
                        engine.stop(number)
                    shown = figures.stage([animation(frames, engine.pipe.fps)], f"{words}, {len(frames)} frames")
                    yield [gr.skip(), shown, badges(rows)]
                stats = VideoStats(name, int(start or 0), rows, sum(each.seconds for each in rows))
                stats.stopped = len(rows) < int(count)
                yield [figures.note(news(stats, len(frames), engine.pipe.fps)), gr.skip(), gr.skip()]
        finally:
            taken.stop.set()
            runs.end(number)

    def end(number: str) -> None:
        runs.stop(number)
        engine.stop(number)

    def move(number: str, level: float | None) -> None:
        if level is not None:
            engine.set_tau(number, float(level))

    stays = gr.State(True) if lock is None else lock
    values = [ticket, prompt, own.method, own.tau, own.blocks, seed]

    def starts(event: Any) -> None:
        pressed = event(press, stays, [ticket, seed], trigger_mode="once", **inputs.TALKING)
        pressed.success(draw, values, outputs, show_progress="hidden", **draw_options)

    starts(own.go.click)
    own.tau.input(move, [ticket, own.tau], None, **inputs.QUICK)
    own.stop.click(end, ticket, None, **inputs.QUICK)
    return starts


def build(engine: VideoEngine, runs: Runs, shared: inputs.Inputs, draw_options: dict[str, Any]) -> None:
    """Lay out the tab on the page of an image model, and connect its events."""
    gr.Markdown(
        f"The model {engine.name} makes a video block by block. A small network drafts, a scorer looks, the large one draws "
        "what is not good enough.",
        elem_classes="vg-hint",
    )
    with gr.Row(elem_id="video-examples", elem_classes="vg-examples"):
        for example in _EXAMPLES:
            button = gr.Button(example, size="sm", min_width=0, elem_classes="example")
            button.click(None, None, shared.prompt, js=f"() => {json.dumps(example)}", api_visibility="private")
    own = controls(engine, "video-")
    wire(engine, runs, shared.prompt, shared.seed, own, screen("video-"), draw_options, shared.lock)

"""The Video mode: a video that plays while it is generated, block by block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr
import torch
from PIL import Image

from vargen.demo.calls import new_file, watch
from vargen.demo.inputs import COPY_LINK, Mode, Shared, Updates, Values, build_methods, select_method
from vargen.demo.links import make_link
from vargen.pipelines.videos import to_uint8

_MAX_BLOCKS = 64
_EXAMPLES = ("winking face", "beating heart", "waving hand")


def build_video_tab(pipe: Any, shared: Shared, scorer: Any, image_pipe: Any) -> Mode:
    """Lay out the mode. `image_pipe` generates the image that a video starts from, if the model starts from one."""
    starts = image_pipe is not None and pipe.setting("image")
    default = pipe.resolve_method(None, from_image=starts).name
    threshold = pipe.resolve_method(None).threshold
    with gr.Row():
        with gr.Column(scale=5, min_width=280):
            examples = gr.Dataset(components=[shared.prompt], samples=[[each] for each in _EXAMPLES], show_label=False)
            examples.click(lambda sample: sample[0], examples, shared.prompt, show_progress="hidden", api_visibility="private")
            note = gr.Markdown("A short loop, which plays while it is generated.", elem_id="video-note")
            clip = gr.Image(
                show_label=False, format="webp", interactive=False, buttons=[], elem_id="clip", visible=False,
            )  # fmt: skip
            with gr.Row(elem_id="video-actions"):
                save = gr.DownloadButton("Save video", elem_id="video-save")
                copy = gr.Button("Copy link to share", elem_id="video-copy")
            copy.click(None, shared.link, None, js=COPY_LINK, api_visibility="private")
        with gr.Column(scale=4, min_width=280):
            method = build_methods(pipe, "video-method", default)
            blocks = gr.Slider(
                1, _MAX_BLOCKS, min(_MAX_BLOCKS, int(pipe.setting("num_blocks"))), step=1, label="Length in blocks",
                info=f"A block is some {_block_seconds(pipe):.1f} seconds.", elem_id="blocks",
            )  # fmt: skip
            tau = gr.Slider(
                -10, 10, 0.0 if threshold is None else threshold, step=0.1, label="How good a draft must be", elem_id="tau",
                info="Of Fast: parts of the small model with a lower score are generated again by the large one.",
                visible=threshold is not None,
            )  # fmt: skip

    def run(values: Values) -> Iterator[Updates]:
        prompt, name, seed = shared.read_prompt(values), values[method], int(values[shared.seed])
        count = int(values[blocks])
        image = (image_pipe or False) if pipe.setting("image") else False
        limit = values[tau] if pipe.resolve_method(name).threshold is not None else None

        def work(report: Callable[[Any], None], stopped: threading.Event) -> None:
            stream = pipe.stream(
                prompt, image=image, num_blocks=count, accelerator=name, tau=limit, scorer=scorer,
                generator=torch.Generator().manual_seed(seed), callback=lambda _: not stopped.is_set(),
            )  # fmt: skip
            try:
                for block in stream:
                    report((block.record.source, stream.stats.seconds, to_uint8(block.frames)))
            finally:
                stream.close()

        yield {note: f"Generating “{prompt}” …"}
        frames, sources, seconds = list[Image.Image](), list[str](), 0.0
        for report in watch(work):
            if report is None:
                yield {note: gr.skip()}
                continue
            source, seconds, pixels = report
            frames += [Image.fromarray(each) for each in pixels]
            sources.append(source)
            path = new_file(f"vargen-{seed}.webp")
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=round(1000 / pipe.fps), loop=0, quality=90)
            yield {
                clip: gr.Image(path, visible=True),
                note: f"Generating “{prompt}”: block {len(sources)} of {count}, {_describe_sources(sources)} …",
            }
        link = make_link("video", prompt, seed, name, {}, {})
        length = f"{len(frames)} frames, {len(frames) / pipe.fps:.1f} s of video"
        yield {
            save: path,
            note: f"**{prompt}**: {length} in {seconds:.1f} s, seed {seed}; {_describe_sources(sources)}.",
            shared.link: link,
        }

    return Mode(
        "Generate",
        run,
        [method, blocks, tau],
        [clip, save, note],
        note,
        lambda name: select_method(pipe, method, name),
    )


def _describe_sources(sources: list[str]) -> str:
    """Return how many blocks each model generated."""
    small = sources.count("draft")
    return f"{small} of {len(sources)} blocks by the small model" if small else "all by the large model"


def _block_seconds(pipe: Any) -> float:
    geometry = pipe.transformer.geometry
    return float(geometry.block_frames * geometry.temporal_stride / pipe.fps)

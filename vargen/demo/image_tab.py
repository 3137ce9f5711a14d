"""The Image mode: one image or four to choose from, which fill in during generation, and what a visitor does with them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr
from PIL import Image

from vargen.demo.calls import Progress, generate, new_file, user_errors
from vargen.demo.inputs import COPY_LINK, Mode, Shared, Updates, Values, build_methods, select_method
from vargen.demo.links import make_link
from vargen.demo.opening import SCRIPT
from vargen.image_metadata import read_parameters
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.regeneration import regenerate
from vargen.scoring.protocol import Scorer, score_images
from vargen.values import short_repr

logger = logging.getLogger("vargen")

_PAST = 24  # images of a visit that are kept


def describe(progress: Progress, baseline: int) -> str:
    """Return passes, which the page calls steps, and seconds of an image: "45 steps instead of 256, 0.6 s"."""
    plural = "s" if progress.passes != 1 else ""
    instead = f" instead of {baseline}" if progress.passes < baseline else ""
    return f"{progress.passes} step{plural}{instead}, {progress.seconds:.2f} s"


def build_image_tab(pipe: VisualPipeline, shared: Shared, count: gr.Radio, scorer: Scorer | None, opening: str) -> Mode:
    """Lay out the mode. `opening`: HTML that is shown until the first image."""
    note = gr.Markdown("Type a prompt and press Enter.", elem_id="note")
    first = gr.HTML(opening, visible=bool(opening), elem_id="opening", js_on_load=SCRIPT.read_text("utf-8") if opening else "")
    past, shown = gr.State([]), gr.State([])
    with gr.Row(elem_id="result", visible=not opening) as result:
        with gr.Column(scale=5, min_width=280):
            stage = gr.Gallery(
                show_label=False, columns=1, height="auto", object_fit="contain", format="png", interactive=False,
                elem_id="stage", buttons=["fullscreen", "download"],
            )  # fmt: skip
            with gr.Row():
                save = gr.DownloadButton("Save image", elem_id="save")
                copy = gr.Button("Copy link to share", elem_id="copy")
        with gr.Column(scale=4, min_width=280):
            method = build_methods(pipe, "method", pipe.default_method)
            strip = gr.Gallery(
                label="Images of this visit", columns=4, height="auto", object_fit="contain", format="png",
                interactive=False, allow_preview=False, elem_id="visit", buttons=[],
            )  # fmt: skip
    copy.click(None, shared.link, None, js=COPY_LINK, api_visibility="private")

    def run(values: Values) -> Iterator[Updates]:
        prompt, name, seed = shared.read_prompt(values), values[method], int(values[shared.seed])
        sampling = shared.read_sampling(values, pipe)
        seeds = range(seed, seed + values[count])
        columns = 2 if values[count] > 1 else 1
        yield {
            first: gr.HTML(visible=False), result: gr.Row(visible=True), stage: gr.Gallery(None, columns=columns),
            note: f"Generating “{prompt}” …",
        }  # fmt: skip
        for progress in generate(pipe, prompt, seeds, accelerator=name, **sampling):
            if progress is None:
                yield {note: gr.skip()}
            elif progress.result is None:
                done = f"{progress.tokens} of {pipe.num_tokens} tokens in {describe(progress, 0)}"
                yield {stage: _show(progress.images), note: f"Generating “{prompt}”: {done} …"}
            else:
                finished = progress
        paths = [finished.result.save(new_file(f"vargen-{each}.png"), k) for k, each in enumerate(seeds)]
        captions, best = _caption(scorer, prompt, finished.images, seeds)
        label = "Save image" if best is None else "Save the best one"
        listed = list(zip(map(str, paths), captions, strict=True))
        kept = [*reversed([path for path, _ in listed]), *values[past]][:_PAST]
        link = make_link("image", prompt, seed, name, shared.read_values(values), pipe.default_sampling)
        yield {
            stage: gr.Gallery(listed if len(listed) > 1 else [listed[0][0]], columns=columns), shown: listed,
            note: f"**{prompt}**: {describe(finished, pipe.num_baseline_passes)}, seed {seed}. {_promise(pipe, name)}",
            save: gr.DownloadButton(label, value=listed[best or 0][0]),
            past: kept, strip: kept, shared.link: link,
        }  # fmt: skip

    def choose(listed: list[tuple[str, str]], selected: gr.SelectData) -> Any:
        """Have the button save the image that was clicked."""
        if not isinstance(selected.index, int) or not 0 <= selected.index < len(listed):
            return gr.skip()
        return gr.DownloadButton("Save this image" if len(listed) > 1 else "Save image", value=listed[selected.index][0])

    def show_again(kept: list[str], selected: gr.SelectData) -> list[Any]:
        if not isinstance(selected.index, int) or not 0 <= selected.index < len(kept):
            return [gr.skip()] * 4
        path = kept[selected.index]
        found = read_parameters(path)
        subject = found.get("prompt", found.get("class_label"))
        news = f"**{subject}**: from this visit, by {found['accelerator']}, seed {found['seed']}."
        return [gr.Gallery([path], columns=1), [(path, "")], news, gr.DownloadButton("Save image", value=path)]

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    stage.select(choose, shown, save, **quiet)
    strip.select(show_again, past, [stage, shown, note, save], **quiet)
    inputs = [count, method, past]
    outputs = [first, result, stage, shown, note, save, past, strip]
    return Mode("Generate", run, inputs, outputs, note, lambda name: select_method(pipe, method, name))


def build_comparison(pipe: VisualPipeline) -> None:
    """Lay out what generates a saved image again and compares it."""
    with gr.Accordion("Generate a saved image again, and compare it", open=False, elem_id="again"):
        dropped = gr.File(label="A PNG that vargen wrote", file_types=[".png"], type="filepath", height=120, elem_id="drop")
        verdict = gr.Markdown(elem_id="verdict")

    def check_again(path: str | None) -> Iterator[str]:
        if path is None:
            return
        with user_errors():
            parameters = read_parameters(path)
            yield "Generating the image again …"
            with Image.open(path, formats=["PNG"]) as original:
                found = regenerate(pipe, parameters, original)
            again = new_file("again.png")
            found.image.save(again)
            sign = "✅" if found.same_pixels else "⚠️"
            yield f"{sign} “{parameters.get('prompt', parameters.get('class_label'))}”: {found.describe()}"

    dropped.upload(check_again, dropped, verdict, concurrency_id="generate", api_visibility="private")


def _show(images: Sequence[Image.Image]) -> list[Image.Image]:
    """Return partial images, gray where no token exists yet."""
    return [
        Image.alpha_composite(Image.new("RGBA", each.size, "#e9ebf2"), each.convert("RGBA")).convert("RGB") for each in images
    ]


def _promise(pipe: VisualPipeline, method: str) -> str:
    """Return what a method promises about the image of the baseline; empty if it is the baseline or promises nothing."""
    if method == pipe.baseline or not pipe.resolve_method(method).sequential_tokens:
        return ""
    return "The same image as the slow way; Race shows both."


def _caption(
    scorer: Scorer | None, prompt: str, images: Sequence[Image.Image], seeds: Sequence[int]
) -> tuple[list[str], int | None]:
    """Return a caption for each of several images, and the number of the one that matches the prompt best, if it is known."""
    captions = [f"seed {seed}" for seed in seeds]
    if scorer is None or len(images) == 1:
        return captions, None
    try:
        scores = score_images(scorer, list(images), [prompt] * len(images)).tolist()
    except Exception:
        logger.exception("the scorer failed for %s", short_repr(prompt))
        return captions, None
    best = scores.index(max(scores))
    return [f"{'best match' if k == best else 'match'} {score:.1f}" for k, score in enumerate(scores)], best

"""The generation tab: one method, live previews, the token map, and the images of this session."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from vargen.demo import inputs
from vargen.demo import rendering as figures
from vargen.demo.image_service import Engine
from vargen.demo.jobs import Run, Runs, told_plainly
from vargen.demo.request import MOST_CANDIDATES, MOST_PICTURES, Settings
from vargen.scoring.registry import DEFAULT_SCORER

_KEPT = 24  # images in a session's gallery
_IDLE = "Press Generate, or Enter in the prompt."


def build(engine: Engine, runs: Runs, shared: inputs.Inputs, draw_options: dict[str, Any]) -> tuple[gr.Radio, gr.HTML]:
    """Lay out the tab and connect its events.

    Returns:
        The method component, and the status line, which the drop box also fills.
    """
    with gr.Row(elem_id="go-row"):
        count = gr.Dropdown(
            [(f"{n} picture{'s' if n > 1 else ''}", n) for n in range(1, MOST_PICTURES + 1)],
            value=1, show_label=False, label="Pictures", container=False, min_width=130, scale=1, elem_id="count",
        )  # fmt: skip
        best = gr.Dropdown(
            [(f"best of {n}", n) for n in (1, 2, 4, MOST_CANDIDATES)],
            value=1, show_label=False, label="Candidates", container=False, min_width=130, scale=1, elem_id="best",
            visible=engine.scorer is not None,
        )  # fmt: skip
        go = gr.Button("Generate", variant="primary", min_width=130, scale=3, elem_id="generate", elem_classes=inputs.START)
        stop = gr.Button("Stop", variant="stop", interactive=False, min_width=80, scale=1, elem_id="stop")
    note = gr.HTML(figures.note(_IDLE, "off"), elem_id="note")
    stage = gr.HTML(_stage([None], [], engine, 0, 0.0, "an empty frame"), elem_id="stage")
    download = gr.DownloadButton("Download PNG", interactive=False, size="md", elem_id="download")
    names = [(f"{each.name} · {each.kind} · {each.summary}", each.name) for each in engine.available]
    method = gr.Radio(names, value=engine.default_method, label="Method", elem_id="method", elem_classes="methods")
    left_out = [f"{each.name} ({each.reason.split(': ')[0]})" for each in engine.methods.values() if each.reason is not None]
    if left_out:
        gr.HTML(figures.hint(f"Not with this model: {'; '.join(left_out)}."), padding=True)
    with gr.Accordion("The same picture from the command line", open=False):
        command = gr.Code(language="shell", interactive=False, show_label=False, wrap_lines=True, elem_id="command")
    gallery = gr.Gallery(
        label="Pictures of this session", columns=6, fit_columns=False, height="auto", format="png", interactive=False,
        object_fit="contain",
        buttons=["download", "fullscreen"], elem_id="gallery", visible=False,
    )  # fmt: skip
    kept = gr.State([], time_to_live=3600)
    ticket = gr.Textbox(visible=False)

    def press(request: gr.Request, *values: Any) -> list[Any]:
        *own, method_name, number, candidates, locked = values
        with told_plainly():
            seed = own[2] if locked else inputs.new_seed()
            own[2] = seed
            wanted = inputs.settings(engine, tuple(own), method_name, number, candidates)
        if cut := engine.ignored(wanted.prompt):
            gr.Warning(figures.text(cut))
        news = figures.note("Waiting for a free place …")
        return [runs.begin(request.session_hash or ""), seed, gr.Button(interactive=False), gr.Button(interactive=True), news]

    def draw(number: str, *values: Any) -> Iterator[list[Any]]:
        *own, method_name, pictures, candidates, files = values
        if (taken := runs.start(number)) is None:
            return
        try:
            with told_plainly():
                wanted = inputs.settings(engine, tuple(own), method_name, pictures, candidates)
                run = engine.start(wanted, stop=taken.stop)
                yield [figures.note(f"Drawing “{wanted.prompt}” by {method_name} …"), *[gr.skip()] * 5]
                while not run.done.wait(0.25):
                    yield [gr.skip(), _running(run, engine), *[gr.skip()] * 4]
                drawn = run.result()
                if drawn.stopped:
                    images = run.preview or drawn.images
                    news = f"Stopped after {run.tokens} of {run.total} tokens."
                    view = _stage(images, run.counts, engine, run.tokens, drawn.seconds, f"{wanted.prompt}, unfinished")
                    yield [figures.note(news), view, *[gr.skip()] * 4]
                    return
                new = engine.save(drawn)
                files = [*reversed(new), *files][:_KEPT]
                captions = [figures.scored(told) for told in drawn.told] if engine.scorer else []
                view = _stage(drawn.images, run.counts, engine, run.total, drawn.seconds, wanted.prompt, captions)
                yield [
                    figures.note(f"Drawn in {drawn.seconds:.1f} seconds and {drawn.stats.passes} passes, seed {wanted.seed}."),
                    view,
                    gr.Gallery(files, visible=True, selected_index=None),
                    gr.DownloadButton(value=new[0], interactive=True),
                    command_line(engine, wanted),
                    files,
                ]
        finally:
            taken.stop.set()
            runs.end(number)

    def pick(files: list[str], chosen: gr.SelectData) -> Any:
        return gr.DownloadButton(value=files[chosen.index]) if chosen.index < len(files) else gr.skip()

    pressed = go.click(
        press,
        [*shared.values, method, count, best, shared.lock],
        [ticket, shared.seed, go, stop, note],
        trigger_mode="once",
        **inputs.TALKING,
    )
    drawing = pressed.success(
        draw,
        [ticket, *shared.values, method, count, best, kept],
        [note, stage, gallery, download, command, kept],
        show_progress="hidden",
        **draw_options,
    )
    drawing.then(inputs.idle, None, [go, stop], **inputs.QUICK)
    drawing.failure(lambda: figures.note("Nothing was drawn.", "off"), None, note, **inputs.QUICK)
    stop.click(inputs.stopper(runs), ticket, [note, go, stop], **inputs.QUICK)
    gallery.select(pick, kept, download, **inputs.QUICK)
    return method, note


def _running(run: Run, engine: Engine) -> str:
    images: list[Any] = [*run.preview] or [None] * (run.settings.num_images * run.settings.num_candidates)
    return _stage(images, list(run.counts), engine, run.tokens, run.seconds, f"{run.settings.prompt}, unfinished")


def _stage(
    images: Any, counts: list[int], engine: Engine, drawn: int, seconds: float, alt: str, captions: Sequence[str] = ()
) -> str:
    slowest = " of the slowest picture" if len(images) > 1 else ""
    return (
        f'<div class="vg-duo"><div><h3>Picture</h3>{figures.stage(images, alt, captions)}</div>'
        f"<div><h3>Token map{slowest}</h3>{figures.token_map(counts, engine.grids)}{figures.legend()}"
        f"{figures.progress(drawn, engine.total)}"
        f"{figures.numbers(figures.speed(seconds, drawn, counts, len(images)))}</div></div>"
    )


def command_line(engine: Engine, wanted: Settings) -> str:
    """Return the command that generates the same images."""
    subject = ["--class-label", wanted.prompt] if engine.by_class else [wanted.prompt]
    parts = ["vargen", "generate", *subject, "--seed", str(wanted.seed), "--accelerator", wanted.method]
    parts += ["--guidance-scale", f"{wanted.guidance_scale:g}", "--temperature", f"{wanted.temperature:g}"]
    parts += ["--top-k", str(wanted.top_k or engine.vocab), "--top-p", f"{wanted.top_p:g}"]
    parts += ["--negative-prompt", wanted.negative_prompt] if wanted.negative_prompt else []
    parts += ["-n", str(wanted.num_images)] if wanted.num_images > 1 else []
    if wanted.num_candidates > 1:
        parts += ["--best-of", str(wanted.num_candidates)]
        parts += ["--scorer", engine.scorer_name] if engine.scorer_name != DEFAULT_SCORER else []
    parts += ["--model", engine.name] if engine.name != "emoji" else []
    return shlex.join(parts)

"""The live tab: generates during typing and shows each scale, for models that need only a few passes per image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from vargen.demo import inputs
from vargen.demo import rendering as figures
from vargen.demo.image_service import Engine
from vargen.demo.jobs import Run, Runs, told_plainly

_PAUSE = 0.15  # seconds without a keystroke before generation starts
_LOOK_SECONDS = 0.03  # polling interval for a new preview
_IDLE = "Type in the prompt: the picture follows, with the same seed."


def build(
    engine: Engine, runs: Runs, shared: inputs.Inputs, tabs: list[gr.Tab], own: gr.Tab, draw_options: dict[str, Any]
) -> None:
    """Lay out the tab and connect its events.

    Args:
        tabs: the other tabs. own: this tab; typing while another is open does not start a run.
    """
    names = [(f"{each.name} · {each.kind}", each.name) for each in engine.available]
    method = gr.Radio(names, value=engine.default_method, label="Method", elem_id="live-method", elem_classes="chips")
    dice = gr.Button("Another seed", variant="primary", elem_id="live", elem_classes=inputs.START)
    note = gr.HTML(figures.note(_IDLE, "off"), elem_id="live-note")
    stage = gr.HTML(figures.stage([None], "an empty frame"), elem_id="live-stage")
    ticket, is_open = gr.Textbox(visible=False), gr.State(False)
    own.select(lambda: True, None, is_open, **inputs.QUICK)
    for tab in tabs:
        tab.select(lambda: False, None, is_open, **inputs.QUICK)

    def typed(request: gr.Request, opened: bool, prompt: str) -> str:
        """Return a ticket and stop the run of the previous one; no ticket if there is nothing to generate."""
        session = request.session_hash or ""
        runs.stop_all(session, "live")
        return runs.begin(session, "live") if opened and prompt.strip() else ""

    def opened(request: gr.Request, prompt: str) -> str:
        return typed(request, True, prompt)

    def draw(number: str, *values: Any) -> Iterator[list[Any]]:
        *own_values, method_name = values
        if (taken := runs.start(number)) is None or taken.stop.wait(_PAUSE):
            runs.end(number)
            return
        try:
            with told_plainly():
                wanted = inputs.settings(engine, tuple(own_values), method_name)
                run = engine.start(wanted, stop=taken.stop, every_pass=True)
                shown: list[bytes] = []
                while not run.done.wait(_LOOK_SECONDS):
                    if run.preview is not shown and not taken.stop.is_set():
                        shown = run.preview
                        yield [gr.skip(), figures.stage([*shown], f"{wanted.prompt}, unfinished")]
                drawn = run.result()
                if not drawn.stopped:
                    yield [figures.note(_news(run)), figures.stage([*drawn.images], wanted.prompt)]
        finally:
            taken.stop.set()
            runs.end(number)

    values = [ticket, *shared.values, method]
    another = dice.click(inputs.new_seed, None, shared.seed, **inputs.QUICK)
    events = (another.then, shared.prompt.input, shared.style.input, method.input)
    begun = [event(typed, [is_open, shared.prompt], ticket, **inputs.QUICK) for event in events]
    begun.append(own.select(opened, shared.prompt, ticket, **inputs.QUICK))
    for each in begun:
        each.then(draw, values, [note, stage], show_progress="hidden", **draw_options)


def _news(run: Run) -> str:
    drawn = run.drawn
    assert drawn is not None
    return f"Drawn in {drawn.seconds:.2f} seconds and {drawn.stats.passes} passes, seed {run.settings.seed}."

"""The race tab: compares methods side by side on one prompt and seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr
import torch

from vargen.demo import inputs
from vargen.demo import rendering as figures
from vargen.demo.image_service import Engine
from vargen.demo.jobs import Drawn, Run, Runs, told_plainly
from vargen.demo.rendering import Lane
from vargen.demo.request import MOST_LANES, Settings

_PREFERRED = ("ar", "gumbel", "gsd", "plain", "code", "economy")
IN_TURN, TOGETHER = "in turn", "together"


def build(engine: Engine, runs: Runs, shared: inputs.Inputs, draw_options: dict[str, Any]) -> None:
    """Lay out the tab and connect its events."""
    names = [each.name for each in engine.available]
    methods = gr.CheckboxGroup(
        [(f"{each.name} · {each.kind}", each.name) for each in engine.available],
        value=[name for name in _PREFERRED if name in names] or names[:2],
        label=f"Methods, two to {MOST_LANES}",
        elem_id="racers",
        elem_classes="chips",
    )
    order = gr.Radio(
        [("In turn: each has the machine to itself", IN_TURN), ("Together: they share the machine", TOGETHER)],
        value=IN_TURN,
        label="Start",
        elem_id="order",
    )
    with gr.Row():
        go = gr.Button("Race", variant="primary", elem_id="race", elem_classes=inputs.START)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="race-stop")
    note = gr.HTML(figures.note("The same prompt and seed, drawn by each method.", "off"), elem_id="race-note")
    track = gr.HTML(elem_id="track")
    ticket = gr.Textbox(visible=False)

    def wanted(own: tuple[Any, ...], chosen: list[str]) -> list[Settings]:
        if not 2 <= len(chosen) <= MOST_LANES:
            raise ValueError(f"Choose two to {MOST_LANES} methods to race; {len(chosen)} are chosen.")
        return [inputs.settings(engine, own, name) for name in sorted(chosen, key=names.index)]

    def press(request: gr.Request, *values: Any) -> list[Any]:
        *own, chosen, locked = values
        with told_plainly():
            seed = own[2] if locked else inputs.new_seed()
            own[2] = seed
            wanted(tuple(own), chosen)
        news = figures.note("Waiting for a free place …")
        return [runs.begin(request.session_hash or ""), seed, gr.Button(interactive=False), gr.Button(interactive=True), news]

    def race(number: str, *values: Any) -> Iterator[list[Any]]:
        *own, chosen, how = values
        if (taken := runs.start(number)) is None:
            return
        try:
            with told_plainly():
                lanes = wanted(tuple(own), chosen)
                yield [figures.note(f"Racing {len(lanes)} methods on “{lanes[0].prompt}”, {how} …"), gr.skip()]
                started: list[Run] = []
                for settings in lanes:
                    started.append(engine.start(settings, stop=taken.stop))
                    while how == IN_TURN and not started[-1].done.wait(0.25):
                        yield [gr.skip(), view(engine, lanes, started)]
                    if taken.stop.is_set():
                        break
                while not all(run.done.wait(0.25) for run in started):
                    yield [gr.skip(), view(engine, lanes, started)]
                drawn = [run.result() for run in started]
                yield [figures.note(verdict(drawn, taken.stop.is_set(), engine.baseline)), view(engine, lanes, started)]
        finally:
            taken.stop.set()
            runs.end(number)

    inputs_of_press = [*shared.values, methods, shared.lock]
    pressed = go.click(press, inputs_of_press, [ticket, shared.seed, go, stop, note], trigger_mode="once", **inputs.TALKING)
    racing = pressed.success(
        race, [ticket, *shared.values, methods, order], [note, track], show_progress="hidden", **draw_options
    )
    racing.then(inputs.idle, None, [go, stop], **inputs.QUICK)
    racing.failure(lambda: figures.note("The race did not finish.", "off"), None, note, **inputs.QUICK)
    stop.click(inputs.stopper(runs), ticket, [note, go, stop], **inputs.QUICK)


def view(engine: Engine, lanes: list[Settings], started: list[Run]) -> str:
    """Render the lanes and their chart; lanes that have not started yet are empty."""
    baseline = next((run.drawn for run in started if run.settings.method == engine.baseline), None)
    runs: list[Run | None] = [*started, *[None] * (len(lanes) - len(started))]
    shown = [_lane(engine, settings, run, baseline) for settings, run in zip(lanes, runs, strict=True)]
    return figures.lanes(shown, lanes[0].prompt) + figures.chart(shown)


def _lane(engine: Engine, settings: Settings, run: Run | None, baseline: Drawn | None) -> Lane:
    method, total = engine.method(settings.method), engine.total
    kind = method.kind if method else ""
    if run is None:
        return Lane(settings.method, kind, None, "waits for its turn", "", 0, total, 0.0, 0.0)
    drawn = run.drawn
    partial = run.preview[0] if run.preview else None
    image = drawn.images[0] if drawn and not drawn.stopped else partial
    caption, badge = f"{run.seconds:.1f} s", ""
    if drawn is not None:
        caption = f"{drawn.seconds:.2f} s, {drawn.tokens_per_second:.0f} tokens per second, {drawn.stats.passes} passes"
        if drawn.stopped:
            caption = f"stopped after {drawn.seconds:.1f} s"
        elif baseline is not None and baseline is not drawn and not baseline.stopped:
            caption += f", {baseline.seconds / drawn.seconds:.2f} times as fast as {engine.baseline}"
            badge = f"identical picture to {engine.baseline}" if identical(drawn, baseline) else ""
        if score := figures.scored(drawn.told[0]):
            caption += f", {score}"
        if kind == "relaxed":
            caption += f", relaxation {drawn.relaxation_per_token:.3f} per token"
    per_pass = run.tokens / len(run.counts) if run.counts else 0.0
    return Lane(settings.method, kind, image, caption, badge, run.tokens, total, run.seconds, per_pass)


def identical(one: Drawn, other: Drawn) -> bool:
    """Whether two results are the same image, token for token."""
    return torch.equal(one.tokens, other.tokens)


def verdict(drawn: list[Drawn], stopped: bool, method: str) -> str:
    """Summarize the result of the race in one line; `method` is the baseline."""
    if stopped:
        return "The race was stopped."
    fastest = min(drawn, key=lambda each: each.seconds)
    line = f"{fastest.settings.method} was first: {fastest.seconds:.2f} seconds."
    baseline = next((each for each in drawn if each.settings.method == method), None)
    same = [each.settings.method for each in drawn if baseline and each is not baseline and identical(each, baseline)]
    return line + (f" {' and '.join(same)} drew the identical picture to {method}." if same else "")

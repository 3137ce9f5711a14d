"""The relaxation tab: the same prompt and seed at increasing relaxation, with the excess acceptance and the speedup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vargen.decoding import Accelerator, GroupedRule, Jacobi, speculative_sampling
from vargen.demo import inputs
from vargen.demo import rendering as figures
from vargen.demo.image_service import Engine
from vargen.demo.jobs import Run, Runs, told_plainly
from vargen.demo.rendering import Lane
from vargen.demo.request import MOST_STEPS


@dataclass(frozen=True)
class Knob:
    """One relaxation parameter: the range of its slider, and the fixed values of the rule's other parameters."""

    label: str
    field: str
    least: float
    most: float
    start: float
    step: float
    others: dict[str, Any]

    def accelerator(self, value: float) -> Accelerator:
        """Return the method with the parameter set to `value`; at 0 it is the exact rule."""
        chosen = int(value) if self.field == "size" else value
        rule = speculative_sampling if value == 0 else GroupedRule(**{**self.others, self.field: chosen})
        return Accelerator(name=f"{self.field} {value:g}", drafter=Jacobi(window=16, coupling="maximal"), acceptance=rule)

    def values(self, strongest: float, count: int) -> list[float]:
        """Return `count` values from 0, the exact rule, to the strongest; fewer if there are not enough integers."""
        raw = [strongest * k / (count - 1) for k in range(count)]
        return sorted({float(round(each)) if self.field == "size" else float(f"{each:.3g}") for each in raw})


KNOBS = {
    knob.field: knob
    for knob in (
        Knob("Budget: relaxation per picture", "budget", 1, 100, 20, 1, {"size": 32, "delta": 1.0}),
        Knob("Group size: tokens judged together", "size", 1, 64, 32, 1, {"delta": 1.0}),
        Knob("Delta: how unlike their probabilities may be", "delta", 0.01, 1, 0.2, 0.01, {"size": 32}),
    )
}


def build(engine: Engine, runs: Runs, shared: inputs.Inputs, draw_options: dict[str, Any]) -> None:
    """Lay out the tab and connect its events."""
    first = KNOBS["budget"]
    gr.Markdown(
        "`gsd` judges a draft by the mass of a group of tokens around it. More relaxation accepts more tokens in a pass, and "
        "moves the pictures away from the model's own distribution. The first picture is exact.",
        elem_classes="vg-hint",
    )
    knob = gr.Radio(
        [(each.label, each.field) for each in KNOBS.values()], value=first.field, label="What to relax", elem_id="knob"
    )
    with gr.Row():
        strongest = gr.Slider(
            first.least, first.most, first.start, step=first.step, label="Up to", scale=2, elem_id="strongest"
        )
        count = gr.Slider(2, MOST_STEPS, 4, step=1, label="Pictures", scale=1, elem_id="steps")
    with gr.Row():
        go = gr.Button("Explore", variant="primary", elem_id="explore", elem_classes=inputs.START)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="explore-stop")
    note = gr.HTML(figures.note("One prompt and seed, from exact to relaxed.", "off"), elem_id="explore-note")
    strip = gr.HTML(elem_id="strip")
    ticket = gr.Textbox(visible=False)

    def turn(field: str) -> gr.Slider:
        chosen = KNOBS[field]
        return gr.Slider(minimum=chosen.least, maximum=chosen.most, value=chosen.start, step=chosen.step)

    def checked(field: Any, most: Any, pictures: Any) -> tuple[Knob, list[float]]:
        chosen = KNOBS.get(field)
        if chosen is None or not isinstance(most, int | float) or not chosen.least <= most <= chosen.most:
            raise ValueError("Choose what to relax, and how far, within the slider's range.")
        if not isinstance(pictures, int | float) or not 2 <= pictures <= MOST_STEPS:
            raise ValueError(f"Choose from 2 to {MOST_STEPS} pictures.")
        return chosen, chosen.values(most, int(pictures))

    def press(request: gr.Request, *values: Any) -> list[Any]:
        *own, field, most, pictures, locked = values
        with told_plainly():
            seed = own[2] if locked else inputs.new_seed()
            own[2] = seed
            inputs.settings(engine, tuple(own), engine.available[0].name)
            checked(field, most, pictures)
        news = figures.note("Waiting for a free place …")
        return [runs.begin(request.session_hash or ""), seed, gr.Button(interactive=False), gr.Button(interactive=True), news]

    def explore(number: str, *values: Any) -> Iterator[list[Any]]:
        *own, field, most, pictures = values
        if (taken := runs.start(number)) is None:
            return
        try:
            with told_plainly():
                chosen, steps = checked(field, most, pictures)
                settings = inputs.settings(engine, tuple(own), engine.available[0].name)
                yield [figures.note(f"Drawing “{settings.prompt}” {len(steps)} times …"), gr.skip()]
                started: list[Run] = []
                for value in steps:
                    started.append(engine.start(settings, chosen.accelerator(value), taken.stop))
                    while not started[-1].done.wait(0.25):
                        yield [gr.skip(), view(engine, chosen, steps, started, settings.prompt)]
                    started[-1].result()
                    if taken.stop.is_set():
                        break
                news = "The strip was stopped." if taken.stop.is_set() else f"Done: seed {settings.seed} in every picture."
                yield [figures.note(news), view(engine, chosen, steps, started, settings.prompt)]
        finally:
            taken.stop.set()
            runs.end(number)

    own = [*shared.values, knob, strongest, count]
    knob.change(turn, knob, strongest, **inputs.QUICK)
    pressed = go.click(press, [*own, shared.lock], [ticket, shared.seed, go, stop, note], trigger_mode="once", **inputs.TALKING)
    exploring = pressed.success(explore, [ticket, *own], [note, strip], show_progress="hidden", **draw_options)
    exploring.then(inputs.idle, None, [go, stop], **inputs.QUICK)
    exploring.failure(lambda: figures.note("The strip was not finished.", "off"), None, note, **inputs.QUICK)
    stop.click(inputs.stopper(runs), ticket, [note, go, stop], **inputs.QUICK)


def view(engine: Engine, knob: Knob, steps: list[float], started: list[Run], prompt: str) -> str:
    """Render the strip and its chart; images that have not started yet are empty."""
    runs: list[Run | None] = [*started, *[None] * (len(steps) - len(started))]
    shown = [_lane(engine, knob, value, run) for value, run in zip(steps, runs, strict=True)]
    return figures.lanes(shown, prompt) + figures.chart(shown, knob.field)


def _lane(engine: Engine, knob: Knob, value: float, run: Run | None) -> Lane:
    name = f"{knob.field} {value:g}" if value else "exact"
    total = engine.total
    if run is None:
        return Lane(name, "", None, "waits for its turn", "", 0, total, 0.0, 0.0)
    drawn = run.drawn
    partial = run.preview[0] if run.preview else None
    image = drawn.images[0] if drawn and not drawn.stopped else partial
    caption = f"{run.seconds:.1f} s"
    if drawn is not None:
        spent = sum(drawn.stats.relaxation)
        caption = f"relaxation {spent:.1f}, {drawn.relaxation_per_token:.3f} per token; {drawn.stats.passes} passes"
        caption = f"stopped after {drawn.seconds:.1f} s" if drawn.stopped else caption
    per_pass = run.tokens / len(run.counts) if run.counts else 0.0
    return Lane(name, "", image, caption, "", run.tokens, total, run.seconds, per_pass)

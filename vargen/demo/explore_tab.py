"""The Explore tab: the same prompt and seed at increasing relaxation, with the excess acceptance and the speedup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vargen.decoding import Accelerator, GroupedRule, Jacobi, speculative_sampling
from vargen.demo import rendering
from vargen.demo.image_service import ImageService
from vargen.demo.inputs import Inputs, make_request
from vargen.demo.jobs import INSTANT_EVENT, POLL_SECONDS, Job, JobControls, JobRegistry, Ticket, connect_job, job_card
from vargen.demo.links import link_to
from vargen.demo.rendering import ResultCard
from vargen.demo.request import MAX_STRIP_IMAGES, PageRequest


@dataclass(frozen=True)
class RelaxationControl:
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
        number = int(value) if self.field == "size" else value
        rule = speculative_sampling if value == 0 else GroupedRule(**{**self.others, self.field: number})
        return Accelerator(name=f"{self.field} {value:g}", drafter=Jacobi(window=16, coupling="maximal"), acceptance=rule)

    def values(self, strongest: float, count: int) -> list[float]:
        """Return `count` values from 0, the exact rule, to the strongest; fewer if there are not enough integers."""
        raw = [strongest * k / (count - 1) for k in range(count)]
        return sorted({float(round(each)) if self.field == "size" else float(f"{each:.3g}") for each in raw})


CONTROLS = {
    control.field: control
    for control in (
        RelaxationControl("Budget: relaxation per image", "budget", 1, 100, 20, 1, {"size": 32, "delta": 1.0}),
        RelaxationControl("Group size: tokens accepted as one", "size", 1, 64, 32, 1, {"delta": 1.0}),
        RelaxationControl("Delta: how much their probabilities may differ", "delta", 0.01, 1, 0.2, 0.01, {"size": 32}),
    )
}


def build_explore_tab(service: ImageService, registry: JobRegistry, shared: Inputs, queue_options: dict[str, Any]) -> None:
    """Lay out the tab and connect its events."""
    first = CONTROLS["budget"]
    field = gr.Radio(
        [(each.label, each.field) for each in CONTROLS.values()], value=first.field, label="What to relax", elem_id="knob"
    )
    with gr.Row():
        strongest = gr.Slider(
            first.least, first.most, first.start, step=first.step, label="Up to", scale=2, elem_id="strongest"
        )
        count = gr.Slider(2, MAX_STRIP_IMAGES, 4, step=1, label="Images", scale=1, elem_id="steps")
    note = gr.HTML(rendering.status_line("", "off"), elem_id="explore-note")
    strip = gr.HTML(elem_id="strip")

    def update_slider(name: str) -> gr.Slider:
        control = CONTROLS[name]
        return gr.Slider(minimum=control.least, maximum=control.most, value=control.start, step=control.step)

    def read_request(*values: Any) -> tuple[PageRequest, RelaxationControl, list[float]]:
        *own, name, most, num_images = values
        control = CONTROLS.get(name)
        if control is None or not isinstance(most, int | float) or not control.least <= most <= control.most:
            raise ValueError("Choose what to relax, and how far, within the slider's range.")
        if not isinstance(num_images, int | float) or not 2 <= num_images <= MAX_STRIP_IMAGES:
            raise ValueError(f"Choose from 2 to {MAX_STRIP_IMAGES} images.")
        return make_request(service, own, service.available[0].name), control, control.values(most, int(num_images))

    def check(*values: Any) -> str:
        return link_to(read_request(*values)[0], service.defaults, "explore")

    def run(ticket: Ticket, *values: Any) -> Iterator[list[Any]]:
        request, control, levels = read_request(*values)
        yield [rendering.status_line(f"Generating “{request.prompt}” {len(levels)} times …"), gr.skip()]
        jobs: list[Job] = []
        for level in levels:
            jobs.append(service.start(request, control.accelerator(level), ticket.stop))
            while not jobs[-1].done.wait(POLL_SECONDS):
                yield [gr.skip(), render_strip(service, control, levels, jobs, request.prompt)]
            jobs[-1].result()
            if ticket.stop.is_set():
                break
        news = "Stopped." if ticket.stop.is_set() else f"Done: seed {request.seed} in every image."
        yield [rendering.status_line(news), render_strip(service, control, levels, jobs, request.prompt)]

    field.change(update_slider, field, strongest, **INSTANT_EVENT)
    controls = JobControls(note, [*shared.sampling, field, strongest, count], [strip])
    connect_job(registry, shared.subject, "explore", controls, check, run, queue_options)


def render_strip(
    service: ImageService, control: RelaxationControl, levels: Sequence[float], jobs: Sequence[Job], prompt: str
) -> str:
    """Render the strip and its chart; images that have not started yet are empty."""
    started: list[Job | None] = [*jobs, *[None] * (len(levels) - len(jobs))]
    cards = [_make_card(service, control, level, job) for level, job in zip(levels, started, strict=True)]
    return rendering.result_cards(cards, prompt) + rendering.chart(cards, control.field)


def _make_card(service: ImageService, control: RelaxationControl, level: float, job: Job | None) -> ResultCard:
    caption = ""
    if job is not None and (result := job.finished) is not None:
        total, per_token = sum(result.stats.relaxation), result.relaxation_per_token
        caption = f"relaxation {total:.1f}, {per_token:.3f} per token; {result.stats.passes} steps"
    return job_card(f"{control.field} {level:g}" if level else "exact", "", job, service.total, caption)

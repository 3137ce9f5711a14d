"""The Race tab: compares methods side by side on one prompt and seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr
import torch

from vargen.demo import rendering
from vargen.demo.history import PastImage
from vargen.demo.image_service import ImageService
from vargen.demo.inputs import Inputs, fill_inputs, filled_inputs, make_request
from vargen.demo.jobs import (
    INSTANT_EVENT,
    POLL_SECONDS,
    Job,
    JobControls,
    JobRegistry,
    JobResult,
    Ticket,
    connect_job,
    job_card,
)
from vargen.demo.links import link_to
from vargen.demo.method_lists import MethodList, build_method_list
from vargen.demo.rendering import ResultCard
from vargen.demo.request import MAX_RACERS, PageRequest

# Selected first, as far as the model runs them: the baseline, a method with the same image, and a relaxed one.
_DEFAULT_RACERS = ("ar", "gumbel", "gsd", "plain", "code")


def build_race_tab(service: ImageService, registry: JobRegistry, shared: Inputs, queue_options: dict[str, Any]) -> MethodList:
    """Lay out the mode and connect its events. Returns the list of methods, which a link selects from."""
    names = [each.name for each in service.available]
    note = gr.HTML(rendering.status_line("", "off"), elem_id="race-note")
    track = gr.HTML(elem_id="track")
    # The style sheet hides it while it has no images: gradio at times keeps what was hidden by an update.
    slider = gr.ImageSlider(label="Slide to compare", type="filepath", interactive=False, buttons=[], elem_id="slider")
    racers = build_method_list(
        gr.CheckboxGroup, service.available, [name for name in _DEFAULT_RACERS if name in names] or names[:2],
        f"Methods, two to {MAX_RACERS}", elem_id="racers", elem_classes="methods",
    )  # fmt: skip

    def validate_racers(*values: Any) -> list[PageRequest]:
        *own, selected = values
        if not 2 <= len(selected) <= MAX_RACERS:
            raise ValueError(f"Choose two to {MAX_RACERS} methods to race; {len(selected)} are chosen.")
        return [make_request(service, own, name) for name in sorted(selected, key=names.index)]

    def check(*values: Any) -> str:
        requests = validate_racers(*values)
        return link_to(requests[0], service.defaults, "race", method=",".join(each.method for each in requests))

    def run(ticket: Ticket, *values: Any) -> Iterator[list[Any]]:
        requests = validate_racers(*values)
        news = f"Racing {len(requests)} methods on “{requests[0].prompt}”, one after the other …"
        yield [rendering.status_line(news), render_track(service, requests, []), None]
        jobs: list[Job] = []
        for request in requests:
            jobs.append(service.start(request, stop=ticket.stop))
            while not jobs[-1].done.wait(POLL_SECONDS):
                yield [gr.skip(), render_track(service, requests, jobs), gr.skip()]
            if ticket.stop.is_set():
                break
        results = [job.result() for job in jobs]
        news = verdict(results, ticket.stop.is_set(), service.baseline)
        track_now = render_track(service, requests, jobs)
        if ticket.stop.is_set():
            yield [rendering.status_line(news), track_now, gr.skip()]
            return
        first, last = (service.save(each)[0] for each in (results[0], results[-1]))
        track_now += rendering.share_buttons(check(*values))
        label = f"Slide to compare {results[0].request.method} (left) and {results[-1].request.method} (right)"
        pair = gr.ImageSlider((first, last), label=label)
        yield [rendering.status_line(news), track_now, pair]

    controls = JobControls(note, [*shared.sampling, racers.choice], [track, slider])
    connect_job(registry, shared.subject, "race", controls, check, run, queue_options)
    return racers


def connect_comparison(service: ImageService, button: gr.Button, shown: gr.State, shared: Inputs, racers: MethodList) -> None:
    """Have a button race the first of the images in `shown` against the baseline: same prompt, seed and sampling.

    The rival of the baseline itself is the default method, or else another one that the model runs.
    """
    others = [service.default_method, *_DEFAULT_RACERS, *(each.name for each in service.available)]
    known = {each.name for each in service.available} - {service.baseline}

    def take_over(images: Sequence[PastImage]) -> dict[Any, Any]:
        if not images:
            return {shared.subject.once: False}
        request = images[0].request
        rivals = [request.method] if request.method != service.baseline else [name for name in others if name in known][:1]
        return {**fill_inputs(shared, request), **racers.select(service.baseline, *rivals)}

    taken = button.click(take_over, shown, [*filled_inputs(shared), racers.choice], **INSTANT_EVENT)
    start = "() => { window.vargen.start('race'); window.vargen.showResult(); }"
    taken.success(None, None, None, js=start, api_visibility="private")


def render_track(service: ImageService, requests: Sequence[PageRequest], jobs: Sequence[Job]) -> str:
    """Render a card per method and their chart; methods that have not started yet are empty."""
    baseline = next((job.finished for job in jobs if job.request.method == service.baseline), None)
    started: list[Job | None] = [*jobs, *[None] * (len(requests) - len(jobs))]
    cards = [_make_card(service, request, job, baseline) for request, job in zip(requests, started, strict=True)]
    return rendering.result_cards(cards, requests[0].prompt) + rendering.chart(cards)


def _make_card(service: ImageService, request: PageRequest, job: Job | None, baseline: JobResult | None) -> ResultCard:
    method = service.method(request.method)
    kind, caption, badge = method.kind if method else "", "", ""
    slow = rendering.plain_name(service.baseline)
    if job is not None and (result := job.finished) is not None:
        caption = f"{result.seconds:.2f} s, {result.stats.passes} steps"
        if baseline is not None and baseline is not result and not baseline.stopped:
            caption += f", {baseline.seconds / result.seconds:.2f} times as fast as {slow}"
            badge = f"Same image as {slow}" if identical(result, baseline) else ""
        if score := rendering.score_caption(result.records[0]):
            caption += f", {score}"
        if kind == "relaxed":
            caption += f", relaxation {result.relaxation_per_token:.3f} per token"
    return job_card(request.method, kind, job, service.total, caption, badge)


def identical(one: JobResult, other: JobResult) -> bool:
    """Whether two results are the same image, token for token."""
    return torch.equal(one.tokens, other.tokens)


def verdict(results: Sequence[JobResult], stopped: bool, baseline_name: str) -> str:
    """Summarize the result of the race in one line."""
    if stopped:
        return "The race was stopped."
    fastest = min(results, key=lambda each: each.seconds)
    line = f"{rendering.plain_name(fastest.request.method)} was first: {fastest.seconds:.2f} seconds."
    baseline = next((each for each in results if each.request.method == baseline_name), None)
    same = [each for each in results if baseline and each is not baseline and identical(each, baseline)]
    names = "It" if same == [fastest] else " and ".join(rendering.plain_name(each.request.method) for each in same)
    return line + (f" {names} gave the same image as {rendering.plain_name(baseline_name)}." if same else "")

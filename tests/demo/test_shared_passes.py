"""Visitors share passes: images and figures are those of jobs alone, and one that stops or fails ends alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("gradio")

from served import Gate
from tiny_models import class_var_pipeline
from waiting import wait_until

from vargen.decoding import NonFiniteLogitsError
from vargen.demo.image_service import ImageService
from vargen.demo.jobs import Job
from vargen.demo.request import PageRequest
from vargen.demo.shared_passes import slowest_counts
from vargen.demo.sources import ImageSource

ONE = PageRequest("a red apple", "ar", 3, 2.0)
TWO = PageRequest("a very long sentence about a cat that sits", "ar", 8, 2.0, 0.7, 5, 0.9, num_images=2)


@pytest.fixture(scope="module")
def shared(service: ImageService) -> Iterator[ImageService]:
    made = ImageService(service.pipe, "tiny", slots=3)
    yield made
    made.close()


@pytest.fixture
def gate(service: ImageService) -> Iterator[Gate]:
    made = Gate(service.pipe.transformer)
    yield made
    made.remove()


def assert_same(job: Job, alone: Job) -> None:
    found, wanted = job.result(), alone.result()
    assert [each.tobytes() for each in found.images] == [each.tobytes() for each in wanted.images]
    assert torch.equal(found.tokens, wanted.tokens) and found.records == wanted.records
    assert job.counts == alone.counts and job.tokens == alone.tokens == job.total
    for name in ("accelerator", "images", "tokens", "passes", "tokens_per_pass", "passes_by_width", "seeds", "relaxation"):
        assert getattr(found.stats, name) == getattr(wanted.stats, name), name
    assert found.seconds > 0 and not found.stopped


@pytest.mark.parametrize("method", ["ar", "gumbel:window=5", "gsd"])
def test_two_visitors_get_the_images_and_figures_of_jobs_alone(
    service: ImageService, shared: ImageService, gate: Gate, method: str
) -> None:
    requests = [replace(each, method=method) for each in (ONE, TWO)]
    gate.close()
    jobs = [shared.start(request) for request in requests]
    wait_until(lambda: gate.passes > 0)
    gate.open()
    for job in jobs:
        job.result()
    passes = gate.passes
    assert passes <= max(len(job.counts) for job in jobs) + 3, "the passes were shared"
    for job, request in zip(jobs, requests, strict=True):
        alone = service.start(request)
        if request.num_images == 1:
            assert_same(job, alone)
        else:  # the number of passes by width is that of the batch for one, and of the images for the other
            assert [each.tobytes() for each in job.result().images] == [each.tobytes() for each in alone.result().images]
            assert job.counts == alone.counts and job.result().stats.passes == alone.result().stats.passes
            assert job.result().stats.tokens_per_pass == alone.result().stats.tokens_per_pass


def test_progress_of_both_visitors_interleaves(shared: ImageService, slow: Callable[[float], None]) -> None:
    slow(0.02)
    jobs = [shared.start(ONE), shared.start(replace(ONE, prompt="a dog", seed=5))]
    wait_until(lambda: all(10 < job.tokens < job.total for job in jobs))
    for job in jobs:
        assert sum(job.counts) <= job.total and not job.done.is_set()
    wait_until(lambda: all(job.preview for job in jobs))
    for job in jobs:
        with Image.open(io.BytesIO(job.preview[0])) as image:
            alpha = image.convert("RGBA").getchannel("A")
            assert alpha.getpixel((0, 0)) == 255 and alpha.getpixel((15, 15)) == 0
        job.stop.set()
    assert all(job.result().stopped for job in jobs)


def test_one_visitor_stops_and_the_other_gets_the_same_image(
    service: ImageService, shared: ImageService, slow: Callable[[float], None]
) -> None:
    slow(0.01)
    stays, goes = shared.start(ONE), shared.start(TWO)
    wait_until(lambda: len(goes.counts) > 3 and len(stays.counts) > 3)
    before = len(goes.counts)
    goes.stop.set()
    result = goes.result()
    assert result.stopped and len(goes.counts) <= before + 3 and len(result.images) == 2
    assert result.stats.stopped and 0 < goes.tokens < goes.total
    slow(0.0)
    assert_same(stays, service.start(ONE))


def test_a_job_that_waits_for_slots_can_be_stopped(shared: ImageService, gate: Gate) -> None:
    gate.close()
    first = shared.start(replace(ONE, num_images=3))
    wait_until(lambda: gate.passes > 0)
    waits = shared.start(TWO)
    waits.stop.set()
    assert waits.result().stopped and waits.tokens == 0
    gate.open()
    assert not first.result().stopped


def test_an_error_of_one_visitor_leaves_the_other(
    service: ImageService, shared: ImageService, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = service.pipe.encode_condition

    def fail_for_cats(**given: Any) -> Any:
        condition, count = encode(**given)
        if "cat" in str(given):
            condition = replace(condition, caption_embeds=condition.caption_embeds * float("nan"))
        return condition, count

    monkeypatch.setattr(service.pipe, "encode_condition", fail_for_cats)
    fails, works = shared.start(TWO), shared.start(ONE)
    with pytest.raises(NonFiniteLogitsError):
        fails.result()
    works.result()
    monkeypatch.undo()
    assert_same(works, service.start(ONE))


def test_other_guidance_and_methods_have_other_batches_and_give_way_when_idle(
    service: ImageService, shared: ImageService
) -> None:
    for number in range(6):
        request = replace(ONE, guidance_scale=1.5 + number, method=["ar", "gumbel"][number % 2])
        assert_same(shared.start(request), service.start(request))


@pytest.mark.parametrize(
    "changes", [{"num_images": 4}, {"negative_prompt": "a dog"}], ids=["more images than slots", "negative prompt"]
)
def test_what_cannot_share_passes_is_generated_in_a_batch_of_its_own(
    service: ImageService, shared: ImageService, changes: dict[str, Any]
) -> None:
    request = replace(ONE, **changes)
    assert_same(shared.start(request), service.start(request))


def test_a_source_image_is_never_ignored(shared: ImageService) -> None:
    job = shared.start(replace(ONE, source=ImageSource(Image.new("RGB", (8, 8)))))
    with pytest.raises(TypeError, match="image"):  # of the pipeline, which takes none
        job.result()


def test_next_scale_images_are_generated_as_before() -> None:
    made = ImageService(class_var_pipeline(), "scales", slots=2)
    request = PageRequest("1", made.default_method, 3, 2.0)
    try:
        jobs = [made.start(request) for _ in range(2)]
        assert_same(jobs[0], jobs[1])
    finally:
        made.close()


def test_counts_of_several_images_are_those_of_the_slowest() -> None:
    assert slowest_counts([[1, 2, 1], [1, 1, 2]], 4) == [1, 1, 2]
    assert slowest_counts([[1, 3], [1, 1]], 4) == [1, 1]
    assert slowest_counts([[1, 2], []], 4) == []

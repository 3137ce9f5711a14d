"""The thread that generates: images equal those generated alone, its queue is bounded, and nobody waits for the dead."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from served import Gate, generate_alone, image_task
from tiny_language_models import make_emu3
from tiny_models import class_pipeline
from waiting import wait_until

from vargen import accelerate
from vargen.decoding import NonFiniteLogitsError, Sampling
from vargen.serving.engine import GenerationThread
from vargen.serving.tasks import ImageTask, QueueFullError, ServiceClosedError


def pixels(image: Any) -> bytes:
    return bytes(image.convert("RGB").tobytes())


@pytest.mark.parametrize("method", ["gumbel", "gsd"])
def test_images_of_random_arrivals_equal_those_generated_alone(text_pipe: Any, method: str) -> None:
    choose, tasks = random.Random(method), [image_task(number) for number in range(8)]
    with GenerationThread(text_pipe, method, slots=3) as generation:
        handles = []
        while len(handles) < len(tasks):
            handles += generation.submit(tasks[len(handles) : len(handles) + choose.choice([1, 2, 4])])
            time.sleep(choose.choice([0, 0.005]))
        results = [handle.result(30) for handle in handles]
    for task, result in zip(tasks, results, strict=True):
        assert pixels(result.image) == pixels(generate_alone(text_pipe, task, method)) and result.seed == task.seed


def test_a_pass_has_rows_only_for_the_tasks_that_are_there(text_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: one task alone, then those that came meanwhile together; a large network always has all slots."""
    gate, rows = Gate(text_pipe.transformer), []
    tasks = [image_task(number) for number in range(4)]

    def note_rows(module: Any, arguments: Any) -> None:
        rows.append(len(arguments[0]))

    hook = text_pipe.transformer.layers[0].register_forward_pre_hook(note_rows)
    with GenerationThread(text_pipe, "ar", slots=4) as generation:
        gate.close()
        handles = generation.submit(tasks[:1])
        gate.wait_for_pass()
        handles += generation.submit(tasks[1:])
        gate.open()
        results = [handle.result(30) for handle in handles]
        first, later = set(rows[: len(rows) // 4]), set(rows[-len(rows) // 4 :])
        monkeypatch.setattr("vargen.serving.schedules.SMALL_NETWORK", 0)
        rows.clear()
        generation.submit(tasks[:1])[0].result(30)
    gate.remove()
    hook.remove()
    assert max(later) == 4 * max(first) == max(rows)
    for task, result in zip(tasks, results, strict=True):
        assert pixels(result.image) == pixels(generate_alone(text_pipe, task, "ar"))


def test_next_scale_images_are_generated_in_batches_by_arrival(scale_pipe: Any) -> None:
    gate = Gate(scale_pipe.transformer)
    tasks = [ImageTask(number, number, Sampling(top_k=7)) for number in range(5)]
    with GenerationThread(scale_pipe, slots=4) as generation:
        gate.close()
        handles = generation.submit(tasks[:1])
        gate.wait_for_pass()
        handles += generation.submit(tasks[1:])
        gate.open()
        results = [handle.result(30) for handle in handles]
    passes = gate.passes
    gate.remove()
    assert passes == 2 * scale_pipe.num_baseline_passes  # the first alone, and the others together
    for task, result in zip(tasks, results, strict=True):
        assert pixels(result.image) == pixels(generate_alone(scale_pipe, task))


def test_a_batch_with_other_options_waits_for_the_next_one(scale_pipe: Any) -> None:
    tasks = [ImageTask(1, number, Sampling(top_k=7 + number // 2)) for number in range(4)]
    with GenerationThread(scale_pipe, slots=4) as generation:
        results = [handle.result(30) for handle in generation.submit(tasks)]
    for task, result in zip(tasks, results, strict=True):
        assert pixels(result.image) == pixels(generate_alone(scale_pipe, task))


def test_a_cancelled_task_leaves_its_slot_before_the_next_pass(text_pipe: Any, gate: Gate) -> None:
    with GenerationThread(text_pipe, "ar", slots=1, max_waiting=4) as generation:
        generation.submit([image_task(3)])[0].result(30)
        before = gate.passes
        gate.close()
        first, waiting, last = generation.submit([image_task(number) for number in range(3)])
        gate.wait_for_pass(before + 1)
        waiting.cancel()
        assert waiting.done() and generation.stats.num_waiting == 1  # it leaves the queue at once
        first.cancel()
        gate.open()
        result = last.result(30)
        assert gate.passes == before + 1 + text_pipe.num_tokens  # the prefill that ran, and those of the last image
    for handle in (first, waiting):
        with pytest.raises(CancelledError):
            handle.result(0)
    assert pixels(result.image) == pixels(generate_alone(text_pipe, image_task(2)))


def test_the_queue_is_bounded_and_takes_all_images_of_a_request_or_none(text_pipe: Any, gate: Gate) -> None:
    with GenerationThread(text_pipe, "ar", slots=2, max_waiting=3) as generation:
        gate.close()
        running = generation.submit([image_task(0), image_task(1)])
        gate.wait_for_pass()
        waiting = generation.submit([image_task(2), image_task(3)])
        with pytest.raises(QueueFullError) as full:
            generation.submit([image_task(4), image_task(5)])
        assert full.value.retry_after >= 1 and generation.stats.num_waiting == 2
        more = generation.submit([image_task(6)])
        gate.open()
        assert all(handle.result(30) for handle in [*running, *waiting, *more])
        assert generation.stats.images == 5 and generation.stats.tokens == 5 * text_pipe.num_tokens


def test_tasks_that_are_being_started_hold_their_slots(text_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, encoding, go_on = text_pipe.encode_condition, threading.Event(), threading.Event()

    def encode_later(**names: Any) -> Any:
        encoding.set()
        assert go_on.wait(30)
        return encode(**names)

    monkeypatch.setattr(text_pipe, "encode_condition", encode_later)
    with GenerationThread(text_pipe, "gumbel", slots=2, max_waiting=2) as generation:
        starting = generation.submit([image_task(0), image_task(1)])
        assert encoding.wait(30) and (generation.stats.num_active, generation.stats.num_waiting) == (2, 0)
        waiting = generation.submit([image_task(2), image_task(3)])
        with pytest.raises(QueueFullError):
            generation.submit([image_task(4)])
        go_on.set()
        assert all(handle.result(30) for handle in [*starting, *waiting])


def test_an_encoder_that_fails_ends_the_tasks_that_it_was_starting(text_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("out of memory")

    with GenerationThread(text_pipe, "gumbel", slots=2) as generation, monkeypatch.context() as patch:
        patch.setattr(text_pipe, "encode_condition", fail)
        for handle in generation.submit([image_task(0), image_task(1)]):
            with pytest.raises(RuntimeError, match="out of memory"):
                handle.result(30)
        patch.undo()
        assert generation.submit([image_task(2)])[0].result(30) and generation.stats.num_active == 0


def test_a_task_that_fails_ends_alone() -> None:
    pipe = class_pipeline()
    with torch.no_grad():
        pipe.transformer.cls_embedding.embedding_table.weight[9] = float("nan")
    with GenerationThread(pipe, "gumbel", slots=3) as generation:
        handles = generation.submit([image_task(number, subject=[1, 9, 2][number]) for number in range(3)])
        with pytest.raises(NonFiniteLogitsError):
            handles[1].result(30)
        for number in (0, 2):
            task = image_task(number, subject=[1, 9, 2][number])
            assert pixels(handles[number].result(30).image) == pixels(generate_alone(pipe, task, "gumbel"))


def test_a_failed_pass_ends_what_ran_and_the_next_task_works(text_pipe: Any, gate: Gate) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of order")

    with GenerationThread(text_pipe, "gumbel", slots=2) as generation:
        broken = text_pipe.transformer.register_forward_pre_hook(fail)
        handles = generation.submit([image_task(0), image_task(1)])
        for handle in handles:
            with pytest.raises(RuntimeError, match="out of order"):
                handle.result(30)
        broken.remove()
        [handle] = generation.submit([image_task(2)])
        assert pixels(handle.result(30).image) == pixels(generate_alone(text_pipe, image_task(2)))


def test_a_listener_that_fails_harms_nobody(text_pipe: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the client's loop has ended")

    with GenerationThread(text_pipe, "gumbel", slots=2) as generation:
        [one], [two] = generation.submit([image_task(0)], fail), generation.submit([image_task(1)])
        assert one.result(30) and two.result(30)


def test_a_prompt_that_is_longer_than_the_batch_has_room_for_gets_a_new_batch() -> None:
    pipe = accelerate(*make_emu3(), size=(3, 4))
    prompts = ["a", "a red apple on the moon , a dog under the green car", "a blue cat", "a red apple on the moon"]
    tasks, method = [ImageTask(prompt, number, Sampling()) for number, prompt in enumerate(prompts)], "gumbel:window=4"
    with GenerationThread(pipe, method, slots=2) as generation:
        results = [handle.result(60) for handle in generation.submit(tasks)]
    for task, result in zip(tasks, results, strict=True):
        assert pixels(result.image) == pixels(generate_alone(pipe, task, method))


@pytest.mark.parametrize("drain", [True, False])
def test_closing_finishes_or_cancels_what_was_accepted(text_pipe: Any, gate: Gate, drain: bool) -> None:
    generation = GenerationThread(text_pipe, "ar", slots=1)
    gate.close()
    handles = generation.submit([image_task(0), image_task(1)])
    gate.wait_for_pass()
    generation.close(drain, timeout=0)
    with pytest.raises(ServiceClosedError):
        generation.submit([image_task(2)])
    assert not generation.stats.alive
    gate.open()
    generation.close(timeout=30)
    wait_until(lambda: all(handle.done() for handle in handles))
    for handle in handles:
        if drain:
            assert handle.result(0).image
        else:
            with pytest.raises(ServiceClosedError):
                handle.result(0)

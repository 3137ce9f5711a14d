"""Replicas that end: a task that had not begun goes to another one, and one that had begun fails. These are stand-ins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from PIL import Image
from served import generate_alone, image_task

pytest.importorskip("ray")
from ray.exceptions import RayActorError

from vargen.serving import ray as ray_replicas
from vargen.serving.engine import GenerationThread
from vargen.serving.ray import Replica, ReplicaSchedule
from vargen.serving.tasks import Begun, Generated, QueueFullError, TaskLostError

OPTIONS: Any = ("tiny", {"name": "tiny", "device": "cpu"}, {"accelerator": "gumbel", "slots": 1})
IMAGE = Generated(7, 4, 16, Image.new("RGB", (2, 2)), torch.zeros(16, dtype=torch.int64))


class FakeHandle:
    """A handle of Ray Serve whose streams follow scripts, one for each call; an exception ends a stream, None waits."""

    def __init__(self, *scripts: list[Any]):
        self.scripts, self.calls, self.cancelled = list(scripts), 0, threading.Event()
        self.generate = self

    def options(self, **_: Any) -> FakeHandle:
        return self

    def remote(self, _: Any) -> FakeHandle:
        self.calls += 1
        return self

    def cancel(self) -> None:
        self.cancelled.set()

    def __iter__(self) -> Iterator[Any]:
        for event in self.scripts[self.calls - 1]:
            if isinstance(event, Exception):
                raise event
            if event is None:
                assert self.cancelled.wait(30)
                raise asyncio.CancelledError
            yield event


@pytest.fixture
def open_replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def make(*scripts: list[Any], **options: Any) -> GenerationThread:
        handle = FakeHandle(*scripts)
        described = type("Described", (), {"remote": lambda _: described(), "result": lambda _: "card"})
        handle.describe = described()  # type: ignore[attr-defined]
        monkeypatch.setattr(ray_replicas, "_deploy", lambda *_: handle)
        return GenerationThread(ReplicaSchedule(1, *OPTIONS), **options)

    yield make


def test_a_task_that_had_not_begun_goes_to_another_replica(open_replicas: Any) -> None:
    replicas = open_replicas([RayActorError()], [RayActorError()], [Begun(), IMAGE])
    [handle] = replicas.submit([image_task(0)])
    assert handle.result(30) is IMAGE and replicas._schedule.pipe.calls == 3
    assert replicas.stats.images == 1 and replicas._schedule.card == "card"


def test_a_task_that_had_begun_fails_with_its_replica(open_replicas: Any) -> None:
    replicas = open_replicas([Begun(), RayActorError()], [Begun(), IMAGE])
    [handle] = replicas.submit([image_task(0)])
    with pytest.raises(TaskLostError):
        handle.result(30)
    assert replicas._schedule.pipe.calls == 1


def test_cancelling_ends_the_stream_of_the_replica(open_replicas: Any) -> None:
    replicas, begun = open_replicas([Begun(), None]), threading.Event()
    [handle] = replicas.submit([image_task(0)], lambda _, event: begun.set())
    assert begun.wait(30)
    handle.cancel()
    with pytest.raises(CancelledError):
        handle.result(30)
    assert replicas._schedule.pipe.cancelled.wait(30)


def test_the_queue_is_bounded(open_replicas: Any) -> None:
    replicas = open_replicas(*[[None]] * 3, max_waiting=2)
    replicas.submit([image_task(number) for number in range(3)])
    with pytest.raises(QueueFullError):
        replicas.submit([image_task(3)])
    assert replicas.stats.num_waiting + replicas.stats.num_active == 3


def test_a_replica_yields_the_events_of_a_task(text_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_replicas, "open_pipeline", lambda **_: text_pipe)
    made = Replica(*OPTIONS, threads=1)
    assert made.describe().size == (8, 8)
    made.check_health()

    async def collect(task: Any) -> list[Any]:
        return [event async for event in made.generate(task)]

    begun, image = asyncio.run(collect(image_task(0)))
    assert isinstance(begun, Begun)
    assert image.image.tobytes() == generate_alone(text_pipe, image_task(0), "gumbel").tobytes()
    failed = asyncio.run(collect(image_task(0, subject=5)))[-1]
    assert type(failed) is RuntimeError
    made._generation.close(drain=False, timeout=30)
    with pytest.raises(RuntimeError, match="ended"):
        made.check_health()

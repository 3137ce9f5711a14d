"""The thread that generates: it owns the pipeline, a bounded queue of tasks and the slots in which they run."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vargen.pipelines.base import VisualPipeline
from vargen.serving.schedules import TaskSchedule, open_schedule
from vargen.serving.tasks import (
    Generated,
    ImageTask,
    Listener,
    QueueFullError,
    ServiceClosedError,
    TaskHandle,
    VideoTask,
)
from vargen.values import require_int

logger = logging.getLogger("vargen")

_IDLE_SECONDS = 60.0  # images that finished earlier no longer count for the rate


@dataclass
class GenerationStats:
    """Counts of a `GenerationThread`.

    Attributes:
        images: number of finished images or videos.
        tokens, passes: of finished images; the tokens of a video are its frames.
        alive: whether tasks are accepted.
        ends: times at which the latest images finished.
    """

    num_waiting: int = 0
    num_active: int = 0
    images: int = 0
    tokens: int = 0
    passes: int = 0
    alive: bool = True
    ends: tuple[float, ...] = ()

    def add(self, image: Generated) -> None:
        """Count a finished image or video."""
        self.images += 1
        self.tokens += image.num_tokens
        self.passes += image.passes
        self.ends = (*self.ends[-31:], time.monotonic())

    @property
    def images_per_second(self) -> float:
        """Images per second in the last minute."""
        now = time.monotonic()
        ends = [end for end in self.ends if end > now - _IDLE_SECONDS]
        return len(ends) / (now - ends[0]) if len(ends) > 1 else 0.0

    def seconds_until_free(self, count: int) -> int:
        """Whole seconds, from 1 to 60, after which `count` more images have probably finished."""
        rate = self.images_per_second
        return min(60, max(1, math.ceil(count / rate))) if rate else 1


class GenerationThread:
    """Generates the tasks of many clients in one thread.

    An image is the same whatever is beside it. All methods can be called from any thread.

    Args:
        pipe: a pipeline on its device, which nothing else may use meanwhile; or a schedule.
        accelerator: see the call of the pipeline. None: the pipeline's default.
        slots: maximum number of images at a time.
        max_waiting: maximum number of tasks in the queue, beside those in slots.
        guidance_scale: of images without one of their own. None: the model's default.
    """

    def __init__(
        self,
        pipe: VisualPipeline | TaskSchedule,
        accelerator: Any = None,
        *,
        slots: int = 4,
        max_waiting: int = 64,
        guidance_scale: float | None = None,
    ):
        self.max_waiting = require_int("max_waiting", max_waiting, 1, 10**6)
        if not isinstance(pipe, TaskSchedule):
            pipe = open_schedule(pipe, accelerator, slots, guidance_scale)
        self._schedule = pipe
        self._waiting: deque[TaskHandle] = deque()
        self._changed = threading.Condition()
        self._closing, self._draining, self._stats = False, True, GenerationStats()
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()

    def __enter__(self) -> GenerationThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def submit(self, tasks: Sequence[ImageTask | VideoTask], listener: Listener | None = None) -> list[TaskHandle]:
        """Queue tasks, all or none, in this order; `listener`: see `TaskHandle`.

        Raises:
            QueueFullError: if the queue has no room for all of them, unless slots are free for them.
            ServiceClosedError: after `close`.
        """
        handles = [TaskHandle(task, listener) for task in tasks]
        with self._changed:
            if self._closing:
                raise ServiceClosedError("the service is shutting down")
            self._waiting = deque(handle for handle in self._waiting if not handle.done())
            free = max(0, self._schedule.slots - self._schedule.num_active)
            if len(self._waiting) + len(handles) > self.max_waiting + free:
                raise QueueFullError(self._stats.seconds_until_free(len(handles)))
            self._waiting.extend(handles)
            self._changed.notify()
        return handles

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Accept no more tasks, and end the thread after the accepted ones or, without `drain`, within one pass."""
        with self._changed:
            self._closing, self._draining = True, self._draining and drain
            self._changed.notify()
        self._thread.join(timeout)

    @property
    def stats(self) -> GenerationStats:
        """Counts so far."""
        with self._changed:
            return replace(
                self._stats,
                num_waiting=sum(not handle.done() for handle in self._waiting),
                num_active=self._schedule.num_active,
                alive=self._thread.is_alive() and not self._closing,
            )

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._schedule.num_active or self._closing):
                    self._changed.wait()
                if self._closing and not self._draining:
                    break
                if self._closing and not (self._waiting or self._schedule.num_active):
                    return
                self._schedule.take(self._waiting)
            try:
                for handle, end in self._schedule.step():
                    if isinstance(end, Generated):
                        with self._changed:
                            self._stats.add(end)
                    handle.send(end)
            except Exception as error:  # all of its images fail
                logger.exception("a pass failed")
                for handle in self._schedule.reset():
                    handle.send(error)
        waiting = [handle for handle in self._waiting if handle.set_running_or_notify_cancel()]
        self._waiting.clear()
        for handle in (*self._schedule.reset(), *waiting):
            handle.send(ServiceClosedError("the service is shutting down"))

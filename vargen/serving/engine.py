"""The thread that generates: it owns the pipeline, a bounded queue of tasks and the slots in which they run."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.validation import validate_batch_size
from vargen.serving.schedules import open_schedule
from vargen.serving.tasks import (
    GeneratedImage,
    GeneratedVideo,
    GenerationStats,
    ImageTask,
    Listener,
    QueueFullError,
    ServiceClosedError,
    TaskCancelledError,
    TaskFailed,
    TaskHandle,
    VideoTask,
)
from vargen.values import require_int

logger = logging.getLogger("vargen")

_RATE_IMAGES = 32  # finished images from which the rate is measured
_IDLE_SECONDS = 60.0  # images that finished earlier no longer count for the rate


class Generator(Protocol):
    """What the HTTP interface needs: a `GenerationThread`, or replicas of one."""

    def submit(self, tasks: Sequence[ImageTask | VideoTask], listener: Listener | None = None) -> list[TaskHandle]:
        """See `GenerationThread.submit`."""

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """See `GenerationThread.close`."""

    @property
    def stats(self) -> GenerationStats:
        """See `GenerationThread.stats`."""


class GenerationThread:
    """Generates the tasks of many clients in one thread.

    With methods whose images can join a running batch (see `VisualPipeline.joins_running_batch`), each slot takes the next task
    as soon as its image has finished or was cancelled. Otherwise, as for next-scale models, tasks are generated in batches of
    equal options by arrival. Videos are generated block by block in turn. An image is the same whatever is beside it.

    Example:
        >>> with GenerationThread(open_pipeline("emoji"), slots=4) as generation:
        ...     [handle] = generation.submit([ImageTask("a red apple", seed=7, sampling=Sampling())])
        ...     handle.result().image.save("apple.png")

    All methods can be called from any thread.

    Args:
        pipe: a pipeline on its device. Nothing else may use it meanwhile.
        accelerator: see the call of the pipeline. None: the pipeline's default.
        slots: maximum number of images at a time.
        max_waiting: maximum number of tasks in the queue, beside those in slots.
        guidance_scale: of images that have none of their own; not for video. None: the checkpoint's default.

    Raises:
        ValueError, TypeError: for invalid arguments, or a method that cannot run on the pipeline.
    """

    def __init__(
        self,
        pipe: VisualPipeline,
        accelerator: Any = None,
        *,
        slots: int = 4,
        max_waiting: int = 64,
        guidance_scale: float | None = None,
    ):
        self.slots = validate_batch_size(slots, "slots")
        self.max_waiting = require_int("max_waiting", max_waiting, 1, 10**6)
        self._schedule = open_schedule(pipe, accelerator, self.slots, guidance_scale)
        self._waiting: deque[TaskHandle] = deque()
        self._changed = threading.Condition()
        self._closing, self._draining = False, True
        self._throughput = Throughput()
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()

    def __enter__(self) -> GenerationThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def submit(self, tasks: Sequence[ImageTask | VideoTask], listener: Listener | None = None) -> list[TaskHandle]:
        """Queue tasks, all or none.

        Args:
            tasks: generated in this order.
            listener: see `TaskHandle`.

        Raises:
            QueueFullError: if the queue has no room for all of them, unless slots are free for them.
            ServiceClosedError: after `close`.
        """
        handles = [TaskHandle(task, listener, self._withdraw) for task in tasks]
        with self._changed:
            if self._closing:
                raise ServiceClosedError
            free = max(0, self.slots - self._schedule.num_active)
            if len(self._waiting) + len(handles) > self.max_waiting + free:
                raise QueueFullError(self._throughput.seconds_until_free(len(handles)))
            self._waiting.extend(handles)
            self._changed.notify()
        return handles

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Accept no more tasks, and end the thread.

        Args:
            drain: finish the accepted tasks first; otherwise, they are cancelled within one pass.
            timeout: seconds to wait; the thread is then left to end with the process.
        """
        with self._changed:
            self._closing, self._draining = True, self._draining and drain
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def stats(self) -> GenerationStats:
        """Counts so far."""
        with self._changed:
            alive = self._thread.is_alive() and not self._closing
            return self._throughput.make_stats(len(self._waiting), self._schedule.num_active, alive)

    def _withdraw(self, handle: TaskHandle) -> None:
        """Take a cancelled task from the queue at once; one that runs is found before the next pass."""
        with self._changed:
            if handle not in self._waiting:
                return
            self._waiting.remove(handle)
        handle.send(TaskFailed(TaskCancelledError()))

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
                for handle, image in self._schedule.step():
                    with self._changed:
                        self._throughput.record(image)
                    handle.send(image)
            except Exception as error:  # of the whole batch: its images fail, and the next ones start in a new one
                logger.exception("a pass failed")
                for handle in self._schedule.reset():
                    handle.send(TaskFailed(error))
        for handle in (*self._schedule.reset(), *self._waiting):
            handle.send(TaskFailed(ServiceClosedError()))
        self._waiting.clear()


class Throughput:
    """Counts of finished images or videos, and how fast they finish. The caller holds a lock."""

    def __init__(self) -> None:
        self._images = self._tokens = self._passes = 0
        self._ends: deque[float] = deque(maxlen=_RATE_IMAGES)

    def record(self, image: GeneratedImage | GeneratedVideo) -> None:
        """Count a finished image or video."""
        self._images += 1
        self._tokens += image.num_tokens
        self._passes += image.passes
        self._ends.append(time.monotonic())

    @property
    def images_per_second(self) -> float:
        """Images per second in the last minute."""
        now = time.monotonic()
        ends = [end for end in self._ends if end > now - _IDLE_SECONDS]
        return len(ends) / (now - ends[0]) if len(ends) > 1 else 0.0

    def seconds_until_free(self, count: int) -> int:
        """Whole seconds, from 1 to 60, after which `count` more images have probably finished."""
        rate = self.images_per_second
        return min(60, max(1, math.ceil(count / rate))) if rate else 1

    def make_stats(self, num_waiting: int, num_active: int, alive: bool) -> GenerationStats:
        """Return all counts."""
        counts = self._images, self._tokens, self._passes
        return GenerationStats(num_waiting, num_active, *counts, self.images_per_second, alive)

"""A running batch that next-token images join and leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from vargen.decoding.engine import Engine
from vargen.decoding.requests import FinishedImage, select_rows
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.seeds import resolve_seeds
from vargen.serving.tasks import (
    Begun,
    GeneratedImage,
    PassFinished,
    TaskCancelledError,
    TaskFailed,
    TaskHandle,
    make_result,
)


class JoiningSchedule:
    """Runs next-token images in an `Engine`: each slot takes the next task as soon as it is free.

    Args:
        pipe: the pipeline. method: resolved. slots: number of rows of the engine. guidance_scale: of all images, or None.
    """

    def __init__(self, pipe: VisualPipeline, method: Any, slots: int, guidance_scale: float | None):
        self.pipe, self.method, self.slots = pipe, method, slots
        scale = pipe.default_sampling["guidance_scale"] if guidance_scale is None else guidance_scale
        self._model = pipe.decoding_model(scale)
        self._engine = self._open()
        self._starting: list[TaskHandle] = []
        self._running: dict[int, TaskHandle] = {}
        self._misfits: deque[TaskHandle] = deque()  # whose condition is longer than the running batch has room for
        self._first: TaskHandle | None = None  # the misfit for whose condition the batch was allocated

    @property
    def num_active(self) -> int:
        return len(self._starting) + len(self._running) + len(self._misfits)

    def take(self, waiting: deque[TaskHandle]) -> None:
        """Take the tasks from the queue that start with the next step."""
        if not self._misfits:  # otherwise nothing joins until the batch is empty and can be allocated for them
            self._starting = [waiting.popleft() for _ in range(min(self.slots - len(self._running), len(waiting)))]

    def step(self) -> Iterator[tuple[TaskHandle, GeneratedImage]]:
        """Start the tasks that were taken, run a pass, and yield the images that finished."""
        if self._misfits and not self._running:
            self._engine = self._open()
            self._starting = [self._misfits.popleft() for _ in range(min(self.slots, len(self._misfits)))]
            self._first = self._starting[0]
        for number, handle in list(self._running.items()):
            if handle.cancelled:
                self._engine.cancel(number)
                del self._running[number]
                handle.send(TaskFailed(TaskCancelledError("the task was cancelled")))
        self._start()
        for finished in self._engine.step():
            if (result := self._finish(finished)) is not None:
                yield result
        if any(handle.task.num_partial_images or handle.task.reports_passes for handle in self._running.values()):
            self._report_pass()

    def reset(self) -> list[TaskHandle]:
        """Give up all tasks that were taken, and return them."""
        lost = [*self._starting, *self._running.values(), *self._misfits]
        self._starting, self._running = [], {}
        self._misfits.clear()
        self._engine = self._open()
        return lost

    def _open(self) -> Engine:
        return Engine(self._model, self.method, batch_size=self.slots)

    def _start(self) -> None:
        """Submit the tasks that were taken. Those of one subject and the same options share a prefill."""
        key = lambda handle: (handle.task.subject, handle.task.sampling)  # noqa: E731
        for (subject, sampling), group in groupby(list(self._starting), key=key):
            together = list(group)
            try:
                names: dict[str, Any] = {"class_labels": [subject]} if self.pipe.is_class_conditional else {"prompt": [subject]}
                condition, _ = self.pipe.encode_condition(**names)
                rows = select_rows(condition, [0] * len(together))
                seeds = resolve_seeds([handle.task.generator for handle in together], len(together)).noise_seeds
                numbers = self._engine.submit(rows, seeds, sampling)
            except (ValueError, TypeError) as error:
                for handle in together:
                    handle.send(TaskFailed(error))
            else:
                for number, handle in zip(numbers, together, strict=True):
                    self._running[number] = handle
                    handle.send(Begun())
            del self._starting[: len(together)]

    def _finish(self, finished: FinishedImage) -> tuple[TaskHandle, GeneratedImage] | None:
        handle = self._running.pop(finished.number)
        if isinstance(finished.error, ValueError) and handle is not self._first:
            self._misfits.append(handle)  # its condition does not fit beside the others
            return None
        if finished.error is not None:
            handle.send(TaskFailed(finished.error))
            return None
        stats = replace(finished.stats, seeds=[handle.task.seed])
        return handle, make_result(self.pipe, handle, finished.tokens[None], stats.passes, stats)

    def _report_pass(self) -> None:
        numbers, tokens, lengths = self._engine.copy_active()
        counts = self._engine.list_counts()
        for number, row, length in zip(numbers, tokens, lengths.tolist(), strict=True):
            handle = self._running[number]
            handle.num_tokens = length
            if handle.task.reports_passes:
                handle.send(PassFinished(counts[number], row.cpu()))
            if handle.is_partial_due(length, self.pipe.num_tokens):
                handle.send_partial(self.pipe.preview(row[None], length)[0], length)

"""Images in batches by arrival, for models whose images cannot join a running batch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from vargen.pipelines.base import VisualPipeline
from vargen.serving.tasks import Begun, GeneratedImage, TaskCancelledError, TaskFailed, TaskHandle, make_result

logger = logging.getLogger("vargen")


class BatchSchedule:
    """Runs images in batches by arrival, for models whose images cannot join a running batch.

    A batch ends early if all of its tasks are cancelled. Arguments: see `JoiningSchedule`.
    """

    def __init__(self, pipe: VisualPipeline, method: Any, slots: int, guidance_scale: float | None):
        self.pipe, self.method, self.slots, self.guidance_scale = pipe, method, slots, guidance_scale
        pipe.set_progress_bar_config(disable=True)
        self._batch: list[TaskHandle] = []

    @property
    def num_active(self) -> int:
        return len(self._batch)

    def take(self, waiting: deque[TaskHandle]) -> None:
        """Take the next batch from the queue: the first tasks, as far as their sampling options are equal."""
        while waiting and len(self._batch) < self.slots:
            if self._batch and waiting[0].task.sampling != self._batch[0].task.sampling:
                break
            self._batch.append(waiting.popleft())

    def step(self) -> Iterator[tuple[TaskHandle, GeneratedImage]]:
        """Generate the batch and yield its images. If it fails, its images are generated one by one; those that fail end."""
        for handle in self._batch:
            handle.send(Begun())
        yield from self._finish(self._batch)
        self._batch = []

    def _finish(self, handles: list[TaskHandle]) -> Iterator[tuple[TaskHandle, GeneratedImage]]:
        try:
            found = self._generate(handles) if handles else []
        except Exception as error:
            if len(handles) > 1:
                for handle in handles:
                    yield from self._finish([handle])
                return
            logger.warning("an image failed: %s", error)
            handles[0].send(TaskFailed(error))
            return
        for handle, image in found:
            if image is None:
                handle.send(TaskFailed(TaskCancelledError("the task was cancelled")))
            else:
                yield handle, image

    def reset(self) -> list[TaskHandle]:
        """Give up all tasks that were taken, and return them."""
        lost, self._batch = self._batch, []
        return lost

    def _generate(self, handles: list[TaskHandle]) -> list[tuple[TaskHandle, GeneratedImage | None]]:
        def after_pass(_: Any, step: int, num_tokens: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
            for row, handle in enumerate(handles):
                handle.num_tokens = num_tokens
                if not handle.cancelled and handle.is_partial_due(num_tokens, self.pipe.num_tokens):
                    handle.send_partial(self.pipe.preview(tensors["latents"][row : row + 1], num_tokens)[0], num_tokens)
            return {"stop": all(handle.cancelled for handle in handles)}

        subjects, sampling = [handle.task.subject for handle in handles], handles[0].task.sampling
        result = self.pipe(
            **{"class_labels" if self.pipe.is_class_conditional else "prompt": subjects},
            guidance_scale=self.guidance_scale,
            temperature=sampling.temperature,
            top_k=sampling.top_k or self.pipe.vocab_size,
            top_p=sampling.top_p,
            accelerator=self.method,
            generator=[handle.task.generator for handle in handles],
            output_type="latent",
            callback_on_step_end=after_pass,
        )
        tokens, passes, stopped = result.images, result.stats.passes, result.stats.stopped
        return [
            (handle, None if stopped or handle.cancelled else make_result(self.pipe, handle, tokens[row : row + 1], passes))
            for row, handle in enumerate(handles)
        ]

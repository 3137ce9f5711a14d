"""Which tasks run together: what each kind of model needs of the thread that generates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.serving.batch_schedule import BatchSchedule
from vargen.serving.joining_schedule import JoiningSchedule
from vargen.serving.tasks import GeneratedImage, GeneratedVideo, TaskHandle
from vargen.serving.video_schedule import VideoSchedule


class TaskSchedule(Protocol):
    """Runs tasks in slots. Only `num_active` is read by other threads."""

    @property
    def num_active(self) -> int:
        """Number of tasks taken and not finished, also while they are being started."""

    def take(self, waiting: deque[TaskHandle]) -> None:
        """Take the tasks from the queue that start with the next step."""

    def step(self) -> Iterator[tuple[TaskHandle, GeneratedImage | GeneratedVideo]]:
        """Start the tasks that were taken, go one step on, and yield what finished; report cancelled and failed tasks."""

    def reset(self) -> list[TaskHandle]:
        """Give up all tasks that were taken, and return them."""


def open_schedule(pipe: VisualPipeline, accelerator: Any, slots: int, guidance_scale: float | None) -> TaskSchedule:
    """Return the schedule for a pipeline and a method."""
    if isinstance(pipe, CausalVideoPipeline):
        if guidance_scale is not None:
            raise ValueError("guidance_scale is for image models, and this model generates video")
        return VideoSchedule(pipe, pipe.resolve_method(accelerator, from_image=pipe.setting("image_model") is not None), slots)
    method = pipe.resolve_method(pipe.default_method if accelerator is None else accelerator)
    pipe.validate_method(method)
    kind = JoiningSchedule if pipe.joins_running_batch else BatchSchedule
    return kind(pipe, method, slots, guidance_scale)

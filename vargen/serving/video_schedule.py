"""Videos block by block: each step generates the next block of each running video."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.pipelines.videos import VideoStream
from vargen.serving.tasks import Begun, GeneratedVideo, TaskCancelledError, TaskFailed, TaskHandle, VideoFrames


class VideoSchedule:
    """Runs up to `slots` videos in turn. A cancelled one ends within one pass.

    Args:
        pipe: the pipeline. method: resolved. slots: maximum number of videos at a time, each of which has memory of its own.
    """

    def __init__(self, pipe: CausalVideoPipeline, method: Any, slots: int):
        self.pipe, self.method, self.slots = pipe, method, slots
        self._starting: deque[TaskHandle] = deque()
        self._running: dict[TaskHandle, VideoStream] = {}

    @property
    def num_active(self) -> int:
        """Number of videos taken and not finished."""
        return len(self._starting) + len(self._running)

    def take(self, waiting: deque[TaskHandle]) -> None:
        """Take the tasks from the queue that start with the next step."""
        self._starting.extend(waiting.popleft() for _ in range(min(self.slots - len(self._running), len(waiting))))

    def step(self) -> Iterator[tuple[TaskHandle, GeneratedVideo]]:
        """Start the tasks that were taken, generate a block of each video, and yield the videos that finished."""
        while self._starting:
            self._start(self._starting[0])
            self._starting.popleft()
        for handle, stream in list(self._running.items()):
            try:
                block = next(stream, None)
            except Exception as error:
                self._end(handle, TaskFailed(error))
                continue
            if block is not None and not handle.cancelled:
                frames = block.frames.mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
                handle.send(VideoFrames(frames))
                handle.num_tokens += len(frames)
                continue
            if handle.cancelled:
                self._end(handle, TaskFailed(TaskCancelledError("the task was cancelled")))
                continue
            self._end(handle)
            yield handle, GeneratedVideo(handle.task.seed, sum(stream.stats.passes.values()), handle.num_tokens)

    def reset(self) -> list[TaskHandle]:
        """Give up all tasks that were taken, and return them."""
        waiting, running = list(self._starting), list(self._running)
        self._starting.clear()
        for handle in running:
            self._end(handle)
        return waiting + running

    def _start(self, handle: TaskHandle) -> None:
        task = handle.task
        try:
            self._running[handle] = self.pipe.stream(
                str(task.subject),
                num_blocks=task.num_blocks,
                accelerator=self.method,
                generator=task.generator,
                callback=lambda _: not handle.cancelled,
            )
        except Exception as error:
            handle.send(TaskFailed(error))
        else:
            handle.send(Begun())

    def _end(self, handle: TaskHandle, event: TaskFailed | None = None) -> None:
        self._running.pop(handle).close()
        if event is not None:
            handle.send(event)

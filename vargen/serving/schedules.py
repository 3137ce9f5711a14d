"""Which tasks run together: next-token images join an engine, others run in batches by arrival, videos block by block."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from vargen.decoding import BlockStream, DecodeStats
from vargen.decoding.engine import Engine
from vargen.decoding.requests import FinishedImage, select_rows
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.pipelines.seeds import resolve_seeds
from vargen.serving.tasks import (
    Begun,
    GeneratedImage,
    GeneratedVideo,
    TaskCancelledError,
    TaskFailed,
    TaskHandle,
    VideoFrames,
)

logger = logging.getLogger("vargen")

Finished = tuple[TaskHandle, GeneratedImage | GeneratedVideo]


class TaskSchedule(ABC):
    """Runs tasks in slots, for the thread that generates. Only `num_active` is read by other threads.

    Args:
        pipe: a pipeline on its device.
        method: resolved.
        slots: maximum number of tasks at a time.
        guidance_scale: of tasks without one of their own. None: the checkpoint's default.

    Attributes:
        starting: tasks that the next step starts, or that wait for a place in what runs.
        running: tasks that have begun, by what runs them.
    """

    def __init__(self, pipe: Any, method: Any, slots: int, guidance_scale: float | None = None):
        self.pipe, self.method, self.slots, self.guidance_scale = pipe, method, slots, guidance_scale
        self.starting: deque[TaskHandle] = deque()
        self.running: dict[Any, TaskHandle] = {}

    @property
    def num_active(self) -> int:
        """Number of tasks taken and not finished, also while they are being started."""
        return len(self.starting) + len(self.running)

    def take(self, waiting: deque[TaskHandle]) -> None:
        """Take the tasks from the queue that start with the next step."""
        while waiting and self.num_active < self.slots:
            self.starting.append(waiting.popleft())

    @abstractmethod
    def step(self) -> Iterator[Finished]:
        """Start the tasks that were taken, go one step on, and yield what finished; report cancelled and failed tasks."""

    def reset(self) -> list[TaskHandle]:
        """Give up all tasks that were taken, and return them."""
        lost = [*self.starting, *self.running.values()]
        self.starting.clear()
        self.running.clear()
        return lost

    def drop_cancelled(self) -> list[Any]:
        """End the tasks that were cancelled; returns what ran them."""
        stopped = [key for key, handle in self.running.items() if handle.cancelled]
        for handle in [*(self.running.pop(key) for key in stopped), *(each for each in self.starting if each.cancelled)]:
            handle.send(TaskFailed(TaskCancelledError()))
        self.starting = deque(handle for handle in self.starting if not handle.cancelled)
        return stopped

    def scale_of(self, handle: TaskHandle) -> float:
        """Return the guidance scale of an image."""
        for scale in (handle.task.guidance_scale, self.guidance_scale):
            if scale is not None:
                return scale
        return self.pipe.default_sampling["guidance_scale"]

    def subjects(self, handles: list[TaskHandle]) -> dict[str, Any]:
        """Return what to generate, as a call of the pipeline takes it."""
        return {"class_labels" if self.pipe.is_class_conditional else "prompt": [each.task.subject for each in handles]}

    def make_result(
        self, handle: TaskHandle, tokens: torch.Tensor, passes: int, stats: DecodeStats | None = None
    ) -> GeneratedImage:
        """Decode the tokens `[1, N]` of a finished image, alone, as if it had been generated alone."""
        image = self.pipe.decode_tokens(tokens)[0]
        return GeneratedImage(image, handle.task.seed, passes, self.pipe.num_tokens, tokens[0].cpu(), stats)


class JoiningSchedule(TaskSchedule):
    """Runs next-token images in an `Engine`: each slot takes the next task as soon as it is free.

    A task that cannot join, because its prompt is longer than there is room for, or because only it or only the others are
    guided, waits with those after it until the engine is empty, and then gets a new one.
    """

    _engine: Engine | None = None
    _is_guided = False
    _encoded: tuple[TaskHandle, Any] | None = None  # the first task that waits, and its condition

    def step(self) -> Iterator[Finished]:
        for number in self.drop_cancelled():
            assert self._engine is not None
            self._engine.cancel(number)
        while self.starting and self._start():
            pass
        if self._engine is None:
            return
        for image in self._engine.step():
            if (result := self._finish(image)) is not None:
                yield result
        if any(handle.task.num_partial_images for handle in self.running.values()):
            self._send_partial_images(self._engine)

    def reset(self) -> list[TaskHandle]:
        self._engine = self._encoded = None
        return super().reset()

    def _start(self) -> bool:
        """Submit the first task, and those after it with its prompt and options, which share a prefill; False if it waits."""
        first = self.starting[0].task
        like = lambda handle: (handle.task.subject, handle.task.options) == (first.subject, first.options)  # noqa: E731
        together = list(takewhile(like, self.starting))
        try:
            if self._encoded is None or self._encoded[0] is not together[0]:
                self._encoded = together[0], self.pipe.encode_condition(**self.subjects(together[:1]))[0]
            scale = self.scale_of(together[0])
            condition = replace(self._encoded[1], scale=scale)
            if (engine := self._find_engine(condition, scale)) is None:
                return False
            seeds = resolve_seeds([handle.generator for handle in together], len(together)).noise_seeds
            numbers = engine.submit(select_rows(condition, [0] * len(together)), seeds, first.sampling)
        except (ValueError, TypeError) as error:
            for handle in together:
                handle.send(TaskFailed(error))
        else:
            for number, handle in zip(numbers, together, strict=True):
                self.running[number] = handle
                handle.send(Begun())
        for _ in together:
            self.starting.popleft()
        return True

    def _find_engine(self, condition: Any, scale: float) -> Engine | None:
        """Return the engine that an image can join, a new one if nothing runs; None if it has to wait."""
        if self._engine is not None and (scale != 1) == self._is_guided and self._engine.has_room(condition):
            return self._engine
        if self.running:
            return None
        self._engine, self._is_guided = None, scale != 1  # which frees its memory
        self._engine = Engine(self.pipe.decoding_model(scale), self.method, batch_size=self.slots)
        return self._engine

    def _finish(self, image: FinishedImage) -> tuple[TaskHandle, GeneratedImage] | None:
        handle = self.running.pop(image.number)
        if image.error is not None:
            handle.send(TaskFailed(image.error))
            return None
        stats = replace(image.stats, seeds=[handle.task.seed])
        return handle, self.make_result(handle, image.tokens[None], stats.passes, stats)

    def _send_partial_images(self, engine: Engine) -> None:
        numbers, tokens, lengths = engine.copy_active()
        for number, row, length in zip(numbers, tokens, lengths.tolist(), strict=True):
            handle = self.running[number]
            handle.num_tokens = length
            if handle.is_partial_due(handle.num_tokens, self.pipe.num_tokens):
                handle.send_partial(self.pipe.preview(row[None], handle.num_tokens)[0], handle.num_tokens)


class BatchSchedule(TaskSchedule):
    """Runs images in batches by arrival, for models whose images cannot join a running batch.

    A batch has equal options, and ends early if all of its tasks are cancelled.
    """

    def take(self, waiting: deque[TaskHandle]) -> None:
        """Take the next batch from the queue: the first tasks, as far as their options are equal."""
        while waiting and len(self.starting) < self.slots:
            if self.starting and waiting[0].task.options != self.starting[0].task.options:
                break
            self.starting.append(waiting.popleft())

    def step(self) -> Iterator[Finished]:
        self.drop_cancelled()
        for handle in self.starting:
            handle.send(Begun())
        yield from self._finish(list(self.starting))
        self.starting.clear()

    def _finish(self, handles: list[TaskHandle]) -> Iterator[Finished]:
        """Generate a batch; if it fails, its images one by one, and those that fail end."""
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
                handle.send(TaskFailed(TaskCancelledError()))
            else:
                yield handle, image

    def _generate(self, handles: list[TaskHandle]) -> list[tuple[TaskHandle, GeneratedImage | None]]:
        """Return the images of a batch, None for cancelled ones."""

        def after_pass(_: Any, step: int, num_tokens: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            for row, handle in enumerate(handles):
                handle.num_tokens = num_tokens
                if not handle.cancelled and handle.is_partial_due(num_tokens, self.pipe.num_tokens):
                    handle.send_partial(self.pipe.preview(tensors["latents"][row : row + 1], num_tokens)[0], num_tokens)
            return {"stop": all(handle.cancelled for handle in handles)}

        task = handles[0].task
        edit = {} if task.edit is None else {"image": task.edit.image, "mask_image": task.edit.mask}
        result = self.pipe(
            **self.subjects(handles),
            **edit,
            guidance_scale=self.scale_of(handles[0]),
            temperature=task.sampling.temperature,
            top_k=task.sampling.top_k or self.pipe.vocab_size,
            top_p=task.sampling.top_p,
            accelerator=self.method,
            generator=[handle.generator for handle in handles],
            output_type="pil" if edit else "latent",  # what an edit keeps is not in its tokens
            callback_on_step_end=after_pass,
        )
        passes, rows = result.stats.passes, result.tokens[:, None]
        images = list[GeneratedImage | None]()
        for number, handle in enumerate(handles):
            if result.stats.stopped or handle.cancelled:
                images.append(None)
            elif edit:
                total = self.pipe.num_tokens
                images.append(GeneratedImage(result.images[number], handle.task.seed, passes, total, rows[number][0].cpu()))
            else:
                images.append(self.make_result(handle, rows[number], passes))
        return list(zip(handles, images, strict=True))


class VideoSchedule(TaskSchedule):
    """Runs videos in turn: each step generates the next block of each. A cancelled one ends within one pass."""

    def step(self) -> Iterator[Finished]:
        while self.starting:
            self._start(self.starting[0])
            self.starting.popleft()
        for stream, handle in list(self.running.items()):
            try:
                block = next(stream, None)
            except Exception as error:
                self._end(stream, TaskFailed(error))
                continue
            if handle.cancelled:
                self._end(stream, TaskFailed(TaskCancelledError()))
            elif block is not None:
                frames = block.frames.mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
                left = None if handle.task.num_frames is None else handle.task.num_frames - handle.num_tokens
                handle.send(VideoFrames(frames[:left]))
                handle.num_tokens += len(frames[:left])
            else:
                self._end(stream)
                yield handle, GeneratedVideo(handle.task.seed, sum(stream.stats.passes.values()), handle.num_tokens)

    def reset(self) -> list[TaskHandle]:
        for stream in self.running:
            stream.close()
        return super().reset()

    def _start(self, handle: TaskHandle) -> None:
        try:
            stream = self.pipe.stream(
                handle.task.subject,
                num_blocks=handle.task.num_blocks,
                accelerator=self.method,
                generator=handle.generator,
                callback=lambda _: not handle.cancelled,
            )
        except Exception as error:
            handle.send(TaskFailed(error))
        else:
            self.running[stream] = handle
            handle.send(Begun())

    def _end(self, stream: BlockStream, event: TaskFailed | None = None) -> None:
        handle = self.running.pop(stream)
        stream.close()
        if event is not None:
            handle.send(event)


def open_schedule(pipe: VisualPipeline, accelerator: Any, slots: int, guidance_scale: float | None) -> TaskSchedule:
    """Return the schedule for a pipeline and a method."""
    if isinstance(pipe, CausalVideoPipeline):
        if guidance_scale is not None:
            raise ValueError("guidance_scale is for image models, and this model generates video")
        return VideoSchedule(pipe, pipe.resolve_method(accelerator, from_image=pipe.setting("image_model") is not None), slots)
    method = pipe.resolve_method(pipe.default_method if accelerator is None else accelerator)
    pipe.validate_method(method)
    pipe.set_progress_bar_config(disable=True)
    kind = JoiningSchedule if pipe.joins_running_batch else BatchSchedule
    return kind(pipe, method, slots, guidance_scale)

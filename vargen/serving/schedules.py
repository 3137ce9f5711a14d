"""Which tasks run together: next-token images join an engine, others run in batches by arrival, videos block by block."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import takewhile
from operator import attrgetter
from typing import Any

import torch

from vargen.decoding.engine import Engine
from vargen.decoding.requests import select_rows
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.pipelines.loading import SMALL_NETWORK
from vargen.pipelines.seeds import resolve_seeds
from vargen.pipelines.validation import validate_batch_size
from vargen.pipelines.videos import to_uint8
from vargen.serving.tasks import Begun, End, Generated, PartialImage, TaskHandle

logger = logging.getLogger("vargen")

_options_of = attrgetter("task.sampling", "task.guidance_scale", "task.edit")  # what images of a batch have in common


class TaskSchedule(ABC):
    """Runs tasks in slots, for the thread that generates. Only `num_active` is read by other threads.

    Attributes:
        starting: tasks that the next step starts, or that wait for a place in what runs.
        running: tasks that have begun, by what runs them.
    """

    needs_equal_options = False  # of what starts together

    def __init__(self, pipe: Any, method: Any, slots: int, guidance_scale: float = 1.0):
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
            if self.needs_equal_options and self.starting and _options_of(waiting[0]) != _options_of(self.starting[0]):
                return
            handle = waiting.popleft()
            if handle.set_running_or_notify_cancel():
                self.starting.append(handle)

    @abstractmethod
    def step(self) -> Iterator[End]:
        """Start the tasks that were taken, go one step on, and yield what ended, and how."""

    def reset(self) -> list[TaskHandle]:
        """Give up all tasks that were taken, and return them."""
        lost = [handle for handle in (*self.starting, *self.running.values()) if not handle.done()]
        self.starting.clear()
        self.running.clear()
        return lost

    def drop_cancelled(self) -> list[Any]:
        """End the tasks that were cancelled; returns what ran them."""
        stopped = [key for key, handle in self.running.items() if handle.stopped]
        for handle in [*(self.running.pop(key) for key in stopped), *(each for each in self.starting if each.stopped)]:
            handle.send(CancelledError())
        self.starting = deque(handle for handle in self.starting if not handle.done())
        return stopped

    def options(self, handles: Sequence[TaskHandle]) -> dict[str, Any]:
        """Return prompts or classes, and the guidance scale of the first one, as a call of the pipeline takes them."""
        name = "class_labels" if self.pipe.is_class_conditional else "prompt"
        subjects, scale = [handle.task.subject for handle in handles], handles[0].task.guidance_scale
        return {name: subjects, "guidance_scale": self.guidance_scale if scale is None else scale}

    def send_partial(self, handle: TaskHandle, tokens: torch.Tensor, count: int) -> None:
        """Send a partial image if one is due; `count` of the tokens `[1, N]` have been generated."""
        wanted, sent, total = handle.task.num_partial_images, handle.num_sent, self.pipe.num_tokens
        if sent < wanted and count < total and count * (wanted + 1) >= total * (sent + 1):
            handle.send(PartialImage(sent, self.pipe.preview(tokens, count)[0]))
            handle.num_sent += 1

    def finish(self, seed: int, tokens: torch.Tensor, passes: int, image: Any = None, **stats: Any) -> Generated:
        """Return a finished image. Its tokens `[1, N]` are decoded alone, for the same bits."""
        image = self.pipe.decode_tokens(tokens)[0] if image is None else image
        return Generated(seed, passes, self.pipe.num_tokens, image, tokens[0].cpu(), **stats)


class JoiningSchedule(TaskSchedule):
    """Runs next-token images in an `Engine`: each slot takes the next task as soon as it is free.

    A pass runs all slots of an engine, so a small network on a CPU has as many as tasks are there when it starts, to the next
    power of two. A task for which it has no slot, whose prompt is too long for it, or that differs in having guidance, waits
    until it is empty, and then gets a new one.
    """

    _engine: Engine | None = None
    _is_guided = False
    _encoded: tuple[TaskHandle, Any] | None = None  # the first task that waits, and its condition

    def step(self) -> Iterator[End]:
        for number in self.drop_cancelled():
            assert self._engine is not None
            self._engine.cancel(number)
        while self.starting and self._start():
            pass
        if self._engine is None:
            return
        for image in self._engine.step():
            seed, stats = self.running[image.number].task.seed, image.stats
            end = image.error or self.finish(seed, image.tokens[None], stats.passes, stats=replace(stats, seeds=[seed]))
            yield self.running.pop(image.number), end
        if any(handle.task.num_partial_images for handle in self.running.values()):
            for number, row, length in zip(*self._engine.copy_active(), strict=True):
                self.send_partial(self.running[number], row[None], int(length))

    def reset(self) -> list[TaskHandle]:
        self._engine = self._encoded = None
        return super().reset()

    def _engine_size(self) -> int:
        """Return the number of slots of the next engine; all where more rows cost a pass little: large networks, and GPUs."""
        if self.pipe.device.type != "cpu" or self.pipe.transformer.num_parameters() >= SMALL_NETWORK:
            return self.slots
        return min(self.slots, 1 << (len(self.starting) - 1).bit_length())

    def _fits(self, condition: Any, scale: float, count: int) -> bool:
        """Whether the engine takes so many tasks with this condition."""
        if self._engine is None or (scale != 1) != self._is_guided or not self._engine.has_room(condition):
            return False
        if not self.running:
            return self._engine.batch_size == self._engine_size()
        return len(self.running) + count <= self._engine.batch_size

    def _start(self) -> bool:
        """Submit the first task, and those after it of other seeds, by one prefill; False if it waits."""
        first = self.starting[0].task
        together = list(takewhile(lambda each: replace(each.task, seed=first.seed) == first, self.starting))
        try:
            options = self.options(together[:1])
            scale = options.pop("guidance_scale")
            if self._encoded is None or self._encoded[0] is not together[0]:
                self._encoded = together[0], self.pipe.encode_condition(**options)[0]
            condition = replace(self._encoded[1], scale=scale)
            if not self._fits(condition, scale, len(together)):
                if self.running:
                    return False
                self._engine, self._is_guided = None, scale != 1  # which frees its memory
                self._engine = Engine(self.pipe.decoding_model(scale), self.method, batch_size=self._engine_size())
            generators = [handle.make_generator() for handle in together]
            seeds = resolve_seeds(generators, len(together)).noise_seeds
            assert self._engine is not None
            numbers = self._engine.submit(select_rows(condition, [0] * len(together)), seeds, first.sampling)
        except (ValueError, TypeError) as error:
            for handle in together:
                handle.send(error)
        else:
            self.running.update(zip(numbers, together, strict=True))
            for handle in together:
                handle.send(Begun())
        for _ in together:
            self.starting.popleft()
        return True


class BatchSchedule(TaskSchedule):
    """Runs images of equal options in batches by arrival. Those of a batch that fails are generated one by one."""

    needs_equal_options = True

    def step(self) -> Iterator[End]:
        self.drop_cancelled()
        batches = [list(self.starting)] if self.starting else []
        for handle in self.starting:
            handle.send(Begun())
        while batches:
            handles = batches.pop(0)
            try:
                ends = self._generate(handles)
            except Exception as error:
                if len(handles) > 1:
                    batches += [[handle] for handle in handles]
                    continue
                logger.warning("an image failed: %s", error)
                ends = [error]
            yield from zip(handles, ends, strict=True)
        self.starting.clear()

    def _generate(self, handles: list[TaskHandle]) -> list[Generated | BaseException]:
        """Return the images of a batch, an error for cancelled ones."""

        def after_pass(_: Any, step: int, num_tokens: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            for row, handle in enumerate(handles):
                if not handle.stopped:
                    self.send_partial(handle, tensors["latents"][row : row + 1], num_tokens)
            return {"stop": all(handle.stopped for handle in handles)}

        task = handles[0].task
        result = self.pipe(
            **self.options(handles),
            **task.edit,
            temperature=task.sampling.temperature,
            top_k=task.sampling.top_k or self.pipe.vocab_size,
            top_p=task.sampling.top_p,
            min_p=task.sampling.min_p,
            accelerator=self.method,
            generator=[handle.make_generator() for handle in handles],
            output_type="pil" if task.edit else "latent",  # what an edit keeps is not in its tokens
            callback_on_step_end=after_pass,
        )
        ends = list[Generated | BaseException]()
        for number, handle in enumerate(handles):
            if result.stats.stopped or handle.stopped:
                ends.append(CancelledError())
                continue
            image = result.images[number] if task.edit else None
            ends.append(self.finish(handle.task.seed, result.tokens[number, None], result.stats.passes, image))
        return ends


class VideoSchedule(TaskSchedule):
    """Runs videos in turn: each step generates the next block of each."""

    def step(self) -> Iterator[End]:
        while self.starting:
            handle = self.starting[0]
            options = {"num_blocks": handle.task.num_blocks, "accelerator": self.method, "generator": handle.make_generator()}
            try:
                stream = self.pipe.stream(handle.task.subject, **options, callback=handle.goes_on)
            except Exception as error:
                yield handle, error
            else:
                self.running[stream] = handle
                handle.send(Begun())
            self.starting.popleft()
        for stream, handle in list(self.running.items()):
            try:
                block = next(stream, None)
                end: Generated | BaseException = Generated(handle.task.seed, sum(stream.stats.passes.values()), handle.num_sent)
            except Exception as error:
                block, end = None, error
            if block is None or handle.stopped:
                del self.running[stream]
                stream.close()
                yield handle, CancelledError() if handle.stopped else end
                continue
            frames = to_uint8(block.frames)[
                : None if handle.task.num_frames is None else handle.task.num_frames - handle.num_sent
            ]
            handle.num_sent += len(frames)
            handle.send(frames)

    def reset(self) -> list[TaskHandle]:
        for stream in self.running:
            stream.close()
        return super().reset()


def open_schedule(pipe: VisualPipeline, accelerator: Any, slots: int, guidance_scale: float | None) -> TaskSchedule:
    """Return the schedule for a pipeline and a method."""
    validate_batch_size(slots, "slots")
    pipe.set_progress_bar_config(disable=True)
    if isinstance(pipe, CausalVideoPipeline):
        if guidance_scale is not None:
            raise ValueError("guidance_scale is for image models, and this model generates video")
        return VideoSchedule(pipe, pipe.resolve_method(accelerator, from_image=pipe.setting("image_model") is not None), slots)
    method = pipe.resolve_method(pipe.default_method if accelerator is None else accelerator)
    pipe.validate_method(method)
    kind = JoiningSchedule if pipe.joins_running_batch else BatchSchedule
    return kind(pipe, method, slots, pipe.default_sampling["guidance_scale"] if guidance_scale is None else guidance_scale)

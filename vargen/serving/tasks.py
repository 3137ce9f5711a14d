"""Tasks of the service: what a client requests, what happens to it, and the handle to follow or cancel it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from vargen.decoding import DecodeStats, Sampling

logger = logging.getLogger("vargen")


class QueueFullError(RuntimeError):
    """Too many images wait. `retry_after` is the number of seconds after which there is probably room."""

    def __init__(self, retry_after: int):
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class ServiceClosedError(RuntimeError):
    """The service shuts down, and accepts no more tasks."""

    def __init__(self) -> None:
        super().__init__("the service is shutting down")


class TaskCancelledError(RuntimeError):
    """The task was cancelled."""

    def __init__(self) -> None:
        super().__init__("the task was cancelled")


class TaskLostError(RuntimeError):
    """The process that generated the image ended."""


@dataclass(frozen=True, eq=False)
class Edit:
    """The image of which others are generated, and the mask of what to inpaint: `image` and `mask_image` of a call."""

    image: Image.Image
    mask: Image.Image | None


@dataclass(frozen=True)
class ImageTask:
    """One requested image.

    Attributes:
        subject: the prompt or, for models of classes, the number or the name of a class.
        seed: of the image, which is the one of `pipe(..., generator=torch.Generator().manual_seed(seed))`.
        sampling: temperature, top-k and top-p.
        num_partial_images: number of partial images, evenly spaced in tokens.
        guidance_scale: None: that of the service.
        edit: an image to inpaint, for models that can.
    """

    subject: str | int
    seed: int
    sampling: Sampling
    num_partial_images: int = 0
    guidance_scale: float | None = None
    edit: Edit | None = None

    @property
    def options(self) -> tuple[Any, ...]:
        """What images of one batch have in common."""
        return self.sampling, self.guidance_scale, self.edit


@dataclass(frozen=True)
class VideoTask:
    """One requested video: its prompt, its seed, its length in blocks, and in frames if the last block is cut."""

    subject: str
    seed: int
    num_blocks: int
    num_frames: int | None = None


@dataclass(frozen=True)
class Begun:
    """A slot took the task."""


@dataclass(frozen=True, eq=False)
class PartialImage:
    """A partial image, RGBA: transparent where nothing has been generated. `index` counts from 0."""

    index: int
    image: Image.Image
    num_tokens: int


@dataclass(frozen=True, eq=False)
class GeneratedImage:
    """The end of a task: its image, and the number of passes that it took part in.

    Attributes:
        tokens: integers, as `decode_tokens` takes them, without the batch.
        stats: of this image alone, without seconds; None if it was generated in a batch by arrival.
    """

    image: Image.Image
    seed: int
    passes: int
    num_tokens: int
    tokens: torch.Tensor
    stats: DecodeStats | None = None


@dataclass(frozen=True, eq=False)
class VideoFrames:
    """The next frames of a video, uint8 `[F, Y, X, 3]`."""

    frames: np.ndarray


@dataclass(frozen=True, eq=False)
class GeneratedVideo:
    """The end of a task: a video whose frames have been sent. `num_tokens` is their number."""

    seed: int
    passes: int
    num_tokens: int


@dataclass(frozen=True, eq=False)
class TaskFailed:
    """The end of a task that was cancelled or failed."""

    error: BaseException


@dataclass(frozen=True)
class GenerationStats:
    """Counts of a `GenerationThread`.

    Attributes:
        num_waiting, num_active: number of tasks in the queue and in slots.
        images: number of finished images or videos.
        tokens, passes: of finished images; passes are those that each took part in. The tokens of a video are its frames.
        images_per_second: of the last minute.
        alive: whether tasks are accepted.
    """

    num_waiting: int = 0
    num_active: int = 0
    images: int = 0
    tokens: int = 0
    passes: int = 0
    images_per_second: float = 0.0
    alive: bool = True


Event = Begun | PartialImage | GeneratedImage | VideoFrames | GeneratedVideo | TaskFailed
Listener = Callable[["TaskHandle", Event], object]


@dataclass(eq=False)
class TaskHandle:
    """An accepted task.

    Attributes:
        task: that was submitted, an `ImageTask` or a `VideoTask`.
        listener: called with each event, in the thread that generates; it must return at once. The last event is a
            `GeneratedImage`, a `GeneratedVideo` or a `TaskFailed`.
        on_cancel: called when the task is cancelled.
        begun: whether a slot has taken it.
        num_tokens: number of tokens so far, of tasks with partial images; of a video, the number of frames.
        num_sent: number of partial images so far.
    """

    task: Any
    listener: Listener | None = None
    on_cancel: Callable[[TaskHandle], None] | None = field(default=None, repr=False)
    begun: bool = False
    num_tokens: int = 0
    num_sent: int = field(default=0, repr=False)
    _future: Future[Any] = field(default_factory=Future, repr=False)
    _cancelled: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    @property
    def ended(self) -> bool:
        """Whether the last event was sent."""
        return self._future.done()

    @property
    def generator(self) -> torch.Generator:
        """A new generator with the seed of the task."""
        return torch.Generator().manual_seed(self.task.seed)

    def cancel(self) -> None:
        """End the task within one pass; does nothing if it has ended. Can be called from any thread."""
        if not self.ended and not self._cancelled.is_set():
            self._cancelled.set()
            if self.on_cancel is not None:
                self.on_cancel(self)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end and return the `GeneratedImage` or `GeneratedVideo`.

        Raises:
            TimeoutError: after `timeout` seconds. Otherwise, the error of the task.
        """
        return self._future.result(timeout)

    def send(self, event: Event) -> None:
        """Report an event; for the thread that generates. Events after the last one are dropped."""
        if self.ended:
            return
        self.begun = self.begun or isinstance(event, Begun)
        if isinstance(event, GeneratedImage | GeneratedVideo):
            self._future.set_result(event)
        elif isinstance(event, TaskFailed):
            self._future.set_exception(event.error)
        if self.listener is not None:
            try:
                self.listener(self, event)
            except Exception:  # of one client; the images of others go on
                logger.exception("a listener failed")

    def is_partial_due(self, num_tokens: int, total: int) -> bool:
        """Whether the next partial image is due at `num_tokens` of `total`."""
        wanted = self.task.num_partial_images
        return self.num_sent < wanted and num_tokens < total and num_tokens * (wanted + 1) >= total * (self.num_sent + 1)

    def send_partial(self, image: Image.Image, num_tokens: int) -> None:
        """Report a partial image."""
        self.send(PartialImage(self.num_sent, image, num_tokens))
        self.num_sent += 1

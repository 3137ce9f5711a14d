"""What clients request, what happens to it, and the handle to follow or cancel it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from vargen.decoding import DecodeStats, Sampling

logger = logging.getLogger("vargen")


class QueueFullError(RuntimeError):
    """Too many images wait; after `retry_after` seconds, there is probably room."""

    def __init__(self, retry_after: int):
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class ServiceClosedError(RuntimeError):
    """The service shuts down, and accepts no more tasks."""


class TaskLostError(RuntimeError):
    """The process that generated the image ended."""


@dataclass(frozen=True)
class ImageTask:
    """One requested image.

    Attributes:
        subject: the prompt or, for models of classes, the number or the name of a class.
        seed: of the image, as in a call of the pipeline.
        sampling: temperature, top-k and top-p.
        num_partial_images: number of partial images, evenly spaced in tokens.
        guidance_scale: None: that of the service.
        edit: `image` and `mask_image` of a call, for models that inpaint.
    """

    subject: str | int
    seed: int
    sampling: Sampling
    num_partial_images: int = 0
    guidance_scale: float | None = None
    edit: Mapping[str, Image.Image] = field(default_factory=dict)


@dataclass(frozen=True)
class VideoTask:
    """One requested video; `num_frames` says where the last block is cut."""

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


@dataclass(frozen=True, eq=False)
class Generated:
    """The end of a task: an image, or a video whose frames have been sent.

    Attributes:
        passes: that it took part in.
        num_tokens: of the image; of a video, the number of frames.
        image: None for a video, as `tokens`.
        tokens: integers `[N]`, as `decode_tokens` takes them.
        stats: of this image alone, without seconds; None if it was generated in a batch by arrival.
    """

    seed: int
    passes: int
    num_tokens: int
    image: Any = None
    tokens: torch.Tensor | None = None
    stats: DecodeStats | None = None


Event = Begun | PartialImage | np.ndarray | Generated | BaseException  # an array is frames, uint8 [F, Y, X, 3]
Listener = Callable[["TaskHandle", Event], object]
End = tuple["TaskHandle", Generated | BaseException]


class TaskHandle(Future[Any]):
    """An accepted task, as a future of its `Generated`.

    Args:
        task: an `ImageTask` or a `VideoTask`.
        listener: called with each event, in the thread that generates; it must return at once. The last event is the
            result or an error; a task that is cancelled while it waits has none.

    Attributes:
        stopped: whether `cancel` was called.
        begun: whether a slot has taken it.
        num_sent: number of partial images or frames so far.
    """

    def __init__(self, task: Any, listener: Listener | None = None):
        super().__init__()
        self.task, self.listener = task, listener
        self.stopped, self.begun, self.num_sent = False, False, 0

    def cancel(self) -> bool:
        """End the task, at once if it waits, else within one pass. Can be called from any thread."""
        self.stopped = True
        return super().cancel()

    def goes_on(self, _: Any) -> bool:
        """Whether nobody has cancelled the task: a callback of a video."""
        return not self.stopped

    def make_generator(self) -> torch.Generator:
        """Return a generator with the seed of the task."""
        return torch.Generator().manual_seed(self.task.seed)

    def send(self, event: Event) -> None:
        """Report an event, from the thread that generates; a listener that fails harms no others."""
        if isinstance(event, Generated):
            self.set_result(event)
        elif isinstance(event, BaseException):
            self.set_exception(event)
        self.begun = self.begun or isinstance(event, Begun)
        try:
            if self.listener is not None:
                self.listener(self, event)
        except Exception:
            logger.exception("a listener failed")

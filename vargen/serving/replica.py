"""A process of Ray Serve that generates: what runs on each GPU or machine of `--engine ray`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from vargen.device import set_threads
from vargen.serving.generation import GenerationThread
from vargen.serving.launch import open_served_model, warm_up
from vargen.serving.model_card import ModelCard
from vargen.serving.tasks import Event, GeneratedImage, GeneratedVideo, ImageTask, TaskFailed, VideoTask


@dataclass(frozen=True)
class ReplicaOptions:
    """What each replica loads and runs.

    Attributes:
        model, dtype, quantization, device: see `open_served_model`.
        name: of the model, for clients.
        accelerator, guidance_scale, slots: see `GenerationThread`.
        threads: CPU threads; None: 1.
    """

    model: str
    name: str
    device: str
    dtype: str
    quantization: str | None
    accelerator: str | None
    guidance_scale: float | None
    slots: int
    threads: int | None


class Replica:
    """A process of Ray Serve that generates."""

    def __init__(self, options: ReplicaOptions):
        set_threads(options.threads or 1)
        pipe = open_served_model(options.model, options.device, options.dtype, options.quantization)
        room: dict[str, Any] = {"slots": options.slots, "max_waiting": options.slots}
        self._generation = GenerationThread(pipe, options.accelerator, guidance_scale=options.guidance_scale, **room)
        self._card = warm_up(pipe, self._generation, options.name)

    def describe(self) -> ModelCard:
        """Return the description of the model."""
        return self._card

    def check_health(self) -> None:
        """Raise RuntimeError if nothing is generated any more; Ray Serve then replaces this replica."""
        if not self._generation.stats.alive:
            raise RuntimeError("the thread that generates has ended")

    async def generate(self, task: ImageTask | VideoTask) -> AsyncGenerator[Event, None]:
        """Yield the events of a task. It is cancelled if nobody takes them any more."""
        events, loop = asyncio.Queue[Event](), asyncio.get_running_loop()
        [handle] = self._generation.submit([task], lambda _, event: loop.call_soon_threadsafe(events.put_nowait, event))
        try:
            while True:
                event = await events.get()
                if isinstance(event, TaskFailed):
                    event = TaskFailed(RuntimeError(f"{type(event.error).__name__}: {event.error}"))  # which can be pickled
                yield event
                if isinstance(event, GeneratedImage | GeneratedVideo | TaskFailed):
                    return
        finally:
            handle.cancel()

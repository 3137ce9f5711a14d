"""Tasks of a service and their images generated alone, an application behind a socket, and a gate before each pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import uvicorn

from vargen.decoding import Sampling
from vargen.serving.api import RequestLimits
from vargen.serving.server import configure_server, open_socket
from vargen.serving.tasks import ImageTask

PROMPTS = ["a red apple", "a very long sentence about a cat that sits", "b", "a dog"]
SAMPLINGS = [Sampling(1.0, None, 1.0), Sampling(0.7, 5, 0.9)]


def image_task(number: int, partial: int = 0, subject: Any = None) -> ImageTask:
    """Task `number` of a mixture of prompts and options."""
    subject = PROMPTS[number % len(PROMPTS)] if subject is None else subject
    return ImageTask(subject, 100 + number, SAMPLINGS[number % 2], partial)


def generate_alone(pipe: Any, task: ImageTask, accelerator: Any = None, **options: Any) -> Any:
    """The image of a task by a call of the pipeline."""
    name = "class_labels" if pipe.is_class_conditional else "prompt"
    sampling = {"temperature": task.sampling.temperature, "top_p": task.sampling.top_p, "min_p": task.sampling.min_p}
    return pipe(
        **{name: task.subject},
        **sampling,
        top_k=task.sampling.top_k or pipe.vocab_size,
        accelerator=accelerator or pipe.default_method,
        generator=torch.Generator().manual_seed(task.seed),
        **options,
    ).images[0]


@contextmanager
def serving(app: Any, limits: RequestLimits | None = None) -> Iterator[str]:
    """Serve an application in a thread; yields its address."""
    listener = open_socket("127.0.0.1", 0)
    config = configure_server(app, limits or RequestLimits(), log_level="critical")
    config.timeout_graceful_shutdown = 5
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


class Gate:
    """Counts the passes of a network, and lets them run only while it is open.

    Attributes:
        passes: number of passes that have begun.
    """

    def __init__(self, network: Any):
        self.passes = 0
        self._open, self._reached = threading.Event(), threading.Condition()
        self._hook = network.register_forward_pre_hook(self._wait)
        self.open()

    def _wait(self, *_: Any) -> None:
        with self._reached:
            self.passes += 1
            self._reached.notify_all()
        assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def wait_for_pass(self, number: int = 1) -> None:
        """Wait until a pass with this number has begun."""
        with self._reached:
            assert self._reached.wait_for(lambda: self.passes >= number, 30)

    def remove(self) -> None:
        self.open()
        self._hook.remove()

"""Replicas of a `GenerationThread` on Ray Serve: the same service on several GPUs or machines.

The HTTP server and the bounded queue stay in this process. A task goes to a replica with a free slot. If a replica ends, its
tasks that had not begun go to another one; clients of those that had begun get an error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vargen.compat import installed_version
from vargen.device import available_cores, set_threads
from vargen.ray_cluster import SETTINGS, join_or_start_cluster
from vargen.serving.engine import GenerationThread, Throughput
from vargen.serving.model_card import ModelCard
from vargen.serving.server import open_served_model, warm_up
from vargen.serving.tasks import (
    Event,
    GeneratedImage,
    GeneratedVideo,
    GenerationStats,
    ImageTask,
    Listener,
    QueueFullError,
    ServiceClosedError,
    TaskCancelledError,
    TaskFailed,
    TaskHandle,
    TaskLostError,
    VideoTask,
)

_ATTEMPTS = 5  # replicas that may end before a task has begun
_APPLICATION = "vargen"
_SETTINGS = {**SETTINGS, "RAY_worker_niceness": "0"}  # replicas have the priority of other processes, not the lowest


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


class RayReplicas:
    """Generates tasks on replicas; see `Generator`.

    Uses the cluster of RAY_ADDRESS, else one on this machine that ends with this process. Ray Serve gives a task to a replica
    with a free slot, replaces replicas that end, and lets those that are replaced finish.

    Args:
        options: of each replica.
        replicas: their number, at least 1.
        max_waiting: maximum number of tasks in the queue, beside those in slots.

    Attributes:
        card: description of the model.

    Raises:
        ImportError: if Ray is not installed.
        RuntimeError: if no replica can be started.
    """

    def __init__(self, options: ReplicaOptions, replicas: int = 1, max_waiting: int = 64):
        if installed_version("ray") is None:
            raise ImportError('engine ray needs Ray: pip install "ray[data,serve]>=2.60"')
        self.options, self.replicas = options, replicas
        self._most = max_waiting + options.slots * replicas
        self._accepted: dict[TaskHandle, Any] = {}  # with the stream of each, once it is sent to a replica
        self._throughput, self._changed, self._closing = Throughput(), threading.Condition(), False
        self._followers = ThreadPoolExecutor(self._most, "replicas")  # each waits for the events of a task
        _start_cluster(replicas, options)
        self._replicas: Any = self._deploy()
        self.card: ModelCard = self._replicas.describe.remote().result()

    def submit(self, tasks: Sequence[ImageTask | VideoTask], listener: Listener | None = None) -> list[TaskHandle]:
        """See `GenerationThread.submit`."""
        handles = [TaskHandle(task, listener, self._cancel) for task in tasks]
        with self._changed:
            if self._closing:
                raise ServiceClosedError
            if len(self._accepted) + len(handles) > self._most:
                raise QueueFullError(self._throughput.seconds_until_free(len(handles)))
            self._accepted.update(dict.fromkeys(handles))
        for handle in handles:
            self._followers.submit(self._follow, handle)
        return handles

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """See `GenerationThread.close`. Also ends the replicas, and Ray in this process."""
        import ray
        from ray import serve

        with self._changed:
            self._closing = True
            if drain:
                self._changed.wait_for(lambda: not self._accepted, timeout)
            left = list(self._accepted)
        for handle in left:
            handle.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._accepted, 10)
        serve.delete(_APPLICATION)
        ray.shutdown()

    def _deploy(self) -> Any:
        """Start the replicas; returns their handle."""
        from ray import serve

        on_gpu = self.options.device.startswith("cuda")
        deployment: Any = serve.deployment(
            Replica,
            name="Replica",
            max_ongoing_requests=self.options.slots,
            ray_actor_options={"num_cpus": self.options.threads or 1, "num_gpus": 1 if on_gpu else 0},
            graceful_shutdown_timeout_s=600,
            health_check_period_s=2,
            num_replicas=self.replicas,
        )
        return serve.run(deployment.bind(self.options), name=_APPLICATION, route_prefix=None)

    @property
    def stats(self) -> GenerationStats:
        """See `GenerationThread.stats`."""
        with self._changed:
            begun = sum(handle.begun for handle in self._accepted)
            return self._throughput.make_stats(len(self._accepted) - begun, begun, not self._closing)

    def _cancel(self, handle: TaskHandle) -> None:
        with self._changed:
            stream = self._accepted.get(handle)
        if stream is not None:
            stream.cancel()

    def _follow(self, handle: TaskHandle) -> None:
        """Send a task to a replica and report its events; again if the replica ends before the task has begun."""
        from ray.exceptions import RayActorError

        lost: BaseException = TaskLostError("the replica that generated the image ended")
        for _ in range(_ATTEMPTS):
            if handle.cancelled or handle.begun:
                break
            stream: Any = self._replicas.options(stream=True).generate.remote(handle.task)
            with self._changed:
                self._accepted[handle] = stream
            if handle.cancelled:  # before the stream was known
                stream.cancel()
            try:
                for event in stream:
                    if isinstance(event, GeneratedImage | GeneratedVideo):
                        with self._changed:
                            self._throughput.record(event)
                    handle.send(event)
                break
            except RayActorError:
                continue
            except (Exception, asyncio.CancelledError) as error:
                lost = error
                break
        with self._changed:
            del self._accepted[handle]
            self._changed.notify_all()
        if handle.cancelled:
            lost = ServiceClosedError() if self._closing else TaskCancelledError()
        handle.send(TaskFailed(lost))  # dropped if the task has ended


def _start_cluster(replicas: int, options: ReplicaOptions) -> None:
    """Join the cluster of RAY_ADDRESS, or start one on this machine; see there."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from ray import serve

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    join_or_start_cluster(max(available_cores(), replicas * (options.threads or 1)) + 1)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})

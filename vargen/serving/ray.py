"""Replicas of a `GenerationThread` on Ray Serve: the same service on several GPUs or machines.

The HTTP server and the bounded queue stay in this process. If a replica ends, Ray Serve starts another one; its tasks that
had not begun are sent again, and clients of those that had begun get an error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from vargen.compat import installed_version
from vargen.device import available_cores, set_threads
from vargen.pipelines.loading import open_pipeline
from vargen.ray_cluster import SETTINGS, join_or_start_cluster
from vargen.serving.api import ModelCard
from vargen.serving.engine import GenerationThread
from vargen.serving.schedules import TaskSchedule
from vargen.serving.server import warm_up
from vargen.serving.tasks import End, Generated, TaskHandle, TaskLostError

_POLL_SECONDS = 0.02  # between looks at new and cancelled tasks
_APPLICATION = "vargen"
_SETTINGS = {**SETTINGS, "RAY_worker_niceness": "0"}  # not the lowest priority


class Replica:
    """A process of Ray Serve that generates.

    Args:
        name: of the model, for clients.
        load: arguments of `open_pipeline`. run: arguments of `GenerationThread`, with `slots`.
        threads: CPU threads.
    """

    def __init__(self, name: str, load: Mapping[str, Any], run: Mapping[str, Any], threads: int):
        set_threads(threads)
        pipe = open_pipeline(**load)
        self._generation = GenerationThread(pipe, max_waiting=run["slots"], **run)
        self._card = warm_up(pipe, self._generation, name)

    def describe(self) -> ModelCard:
        """Return the description of the model."""
        return self._card

    def check_health(self) -> None:
        """Raise RuntimeError if nothing is generated any more, for Ray Serve."""
        if not self._generation.stats.alive:
            raise RuntimeError("the thread that generates has ended")

    async def generate(self, task: Any) -> AsyncGenerator[Any, None]:
        """Yield the events of a task. It is cancelled if nobody takes them any more."""
        events, loop = asyncio.Queue[Any](), asyncio.get_running_loop()
        [handle] = self._generation.submit([task], lambda _, event: loop.call_soon_threadsafe(events.put_nowait, event))
        try:
            event: Any = None
            while not isinstance(event, Generated | BaseException):
                event = await events.get()
                if isinstance(event, BaseException):
                    event = RuntimeError(f"{type(event).__name__}: {event}")  # which can be pickled
                yield event
        finally:
            handle.cancel()


class ReplicaSchedule(TaskSchedule):
    """Sends each task to a replica; a thread for each waits for its events. `card` describes the model."""

    def __init__(self, replicas: int, name: str, load: Mapping[str, Any], run: Mapping[str, Any], threads: int = 1):
        if installed_version("ray") is None:
            raise ImportError('engine ray needs Ray: pip install "ray[data,serve]>=2.60"')
        super().__init__(_deploy(replicas, name, load, run, threads), None, replicas * run["slots"])
        self.card: ModelCard = self.pipe.describe.remote().result()
        self._events = queue.SimpleQueue[tuple[Any, Any]]()

    def step(self) -> Iterator[End]:
        from ray.exceptions import RayActorError

        for stream in self.drop_cancelled():
            stream.cancel()
        while self.starting:
            stream = self.pipe.options(stream=True).generate.remote(self.starting[0].task)
            self.running[stream] = self.starting.popleft()
            threading.Thread(target=self._follow, args=[stream], daemon=True).start()
        try:
            stream, event = self._events.get(timeout=_POLL_SECONDS)
            handle = self.running[stream]
        except (queue.Empty, KeyError):  # the task of a key that is missing was cancelled
            return
        if not isinstance(event, Generated | BaseException):
            handle.send(event)
            return
        del self.running[stream]
        if isinstance(event, RayActorError):
            if not handle.begun:
                self.starting.append(handle)
                return
            event = TaskLostError("the replica that generated the image ended")
        yield handle, event

    def reset(self) -> list[TaskHandle]:
        for stream in self.running:
            stream.cancel()
        return super().reset()

    def _follow(self, stream: Any) -> None:
        try:
            for event in stream:
                self._events.put((stream, event))
        except (Exception, asyncio.CancelledError) as error:
            self._events.put((stream, error))


def _deploy(replicas: int, name: str, load: Mapping[str, Any], run: Mapping[str, Any], threads: int) -> Any:
    """Start replicas in the cluster of RAY_ADDRESS, else of this process; returns their handle."""
    for variable, value in _SETTINGS.items():
        os.environ.setdefault(variable, value)
    from ray import serve

    for part in ("ray", "ray.serve"):
        logging.getLogger(part).setLevel(logging.ERROR)
    join_or_start_cluster(max(available_cores(), replicas * threads) + 1)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    deployment: Any = serve.deployment(
        Replica,
        max_ongoing_requests=run["slots"],
        ray_actor_options={"num_cpus": threads, "num_gpus": int(str(load["device"]).startswith("cuda"))},
        graceful_shutdown_timeout_s=600,
        health_check_period_s=2,
        num_replicas=replicas,
    )
    return serve.run(deployment.bind(name, load, run, threads), name=_APPLICATION, route_prefix=None)


def close_replicas() -> None:
    """End the replicas, and Ray in this process."""
    import ray
    from ray import serve

    serve.delete(_APPLICATION)
    ray.shutdown()

"""The Ray backend: units of work on a pool of actors, each of which is a process. An actor that dies is replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from vargen.compat import installed_version
from vargen.device import available_cores
from vargen.ray_cluster import SETTINGS, join_or_start_cluster


class _Actor:
    """A worker in its own process. Exceptions are returned as values: Ray would wrap them."""

    def __init__(self, worker: Callable[[Any], Any], argument: Any):
        self.worker, self.argument = worker, argument
        self.made: Any = None

    def run(self, unit: Any) -> tuple[bool, Any]:
        """Return `(failed, result)` of a unit; the worker is made at the first one."""
        try:
            if self.made is None:
                self.made = self.worker(self.argument)
            return False, self.made(unit)
        except Exception as error:
            error.__traceback__ = None
            return True, error


def ray_backend(actors: int | None, device: str, threads: int | None) -> Callable[..., Iterator[Any]]:
    """Create a Ray backend; see `vargen.eval.run.run_locally`.

    Uses the cluster that this process joined by `ray.init`, else that of RAY_ADDRESS, else one started for the call.

    Args:
        actors: size of the pool; by default one per GPU of the cluster, or as many as its cores allow at `threads` each.
        device: `"cuda"` gives each actor its own GPU. threads: CPU threads of an actor, 1 by default.
    """
    if installed_version("ray") is None:
        raise ImportError('engine ray needs Ray: pip install "ray[data,serve]>=2.60"')
    cpus, gpus = threads or 1, 1 if device == "cuda" else 0

    def run(worker: Callable[[Any], Any], argument: Any, units: list[Any]) -> Iterator[Any]:
        if not units:
            return
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        import ray
        from ray.util import ActorPool

        started = not ray.is_initialized()
        if started:
            on_sigterm = signal.getsignal(signal.SIGTERM)
            join_or_start_cluster(max(available_cores(), (actors or 1) * cpus))
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray has installed its own
        try:
            resources = ray.cluster_resources()
            possible = resources.get("GPU", 0) if gpus else resources.get("CPU", 1) // cpus
            make = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=-1)(_Actor).remote
            count = min(actors or max(1, int(possible)), len(units))
            pool = ActorPool([make(worker, argument) for _ in range(count)])
            for failed, result in pool.map_unordered(lambda actor, unit: actor.run.remote(unit), units):
                if failed:
                    raise result
                yield result
        finally:
            if started:
                ray.shutdown()

    return run

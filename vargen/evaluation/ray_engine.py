"""Units of work on many processes and machines, by Ray Data: a pool of actors, each of which opens its networks once.

Actors write pictures; what they measured comes back to this process, which alone writes the manifest. An actor that dies is
replaced and its unit done again, so a picture may be drawn twice and is then the same; a line of the manifest is written once.
If this process dies, the manifest has all that came back, and the next call goes on from it.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from vargen.compat import installed_version
from vargen.device import cores

_ADDRESS = "RAY_ADDRESS"  # of a cluster, by Ray's own convention
_MOST_BLOCKS = 20_000
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}  # sends nothing to anyone, and logs into its files


def ray_engine(actors: int | None, device: str, threads: int | None) -> Callable[..., Iterator[Any]]:
    """An engine; see `vargen.evaluation.drawing.locally`.

    Args:
        actors: in the pool; by default one for each GPU of the cluster, or for each so many cores as an actor has threads.
        device: `"cuda"` gives each actor a GPU of its own. threads: CPU threads of an actor, 1 by default.

    Raises:
        ImportError: without Ray.
    """
    if installed_version("ray") is None:
        raise ImportError('engine ray needs Ray: pip install "ray[data]", or the extra ray')

    def run(worker: Callable[[Any], Any], argument: Any, units: list[Any]) -> Iterator[Any]:
        if units:
            yield from _run(worker, argument, units, actors, device, threads or 1)

    return run


def _run(
    worker: Callable[[Any], Any], argument: Any, units: list[Any], actors: int | None, device: str, threads: int
) -> Iterator[Any]:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray
    import ray.data

    for name in ("ray", "ray.data"):  # our own bar tells the progress, and errors come back as values
        logging.getLogger(name).setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    started = not ray.is_initialized()
    if started:
        _start(ray, actors, threads)
    try:
        pool = actors or _pool(ray.cluster_resources(), device, threads)
        rows = [{"unit": pickle.dumps(unit)} for unit in units]
        blocks = min(len(rows), _MOST_BLOCKS)  # a block a unit: what a lost actor costs
        done = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            _Actor,
            fn_constructor_args=(worker, argument),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(pool, len(units))),
            num_cpus=threads,
            num_gpus=1 if device == "cuda" else 0,
        )
        for row in done.iter_rows():
            failed, result = pickle.loads(row["result"])
            if failed:
                raise result
            yield result
    finally:
        if started:
            ray.shutdown()


def _start(ray: Any, actors: int | None, threads: int) -> None:
    """Join the cluster that RAY_ADDRESS names, or begin one here, open to this machine alone."""
    common = {"log_to_driver": False, "configure_logging": False}
    if os.environ.get(_ADDRESS):
        ray.init(**common)
        return
    # One more than the actors need: with none left over, reading the list of units would wait for an actor to end.
    wanted = max(cores(), (actors or 1) * threads) + 1
    ray.init(address="local", num_cpus=wanted, include_dashboard=False, _node_ip_address="127.0.0.1", **common)


def _pool(resources: dict[str, float], device: str, threads: int) -> int:
    if device == "cuda":
        return max(1, int(resources.get("GPU", 0)))
    return max(1, int((resources.get("CPU", 2) - 1) // threads))


class _Actor:
    """A worker in a process of its own. What it raises travels as a value: Ray would wrap it, and retry what cannot succeed."""

    def __init__(self, worker: Callable[[Any], Any], argument: Any):
        self.worker, self.argument = worker, argument
        self.made: Any = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        results = []
        for packed in batch["unit"]:
            try:
                if self.made is None:
                    self.made = self.worker(self.argument)
                answer = (False, self.made(pickle.loads(packed)))
            except Exception as error:
                answer = (True, _plain(error))
            results.append(pickle.dumps(answer))
        return {"result": results}


def _plain(error: Exception) -> Exception:
    """The error itself where it can travel, else one of its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    error.__traceback__ = None
    return error

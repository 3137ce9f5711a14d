"""The process in which Ray runs for `vargen.evaluation.ray_engine`: reads a job from its input, writes results to its output.

It loads no network: workers and units pass through as bytes, from the process that asks to the actors. It ends its cluster,
and itself, after the last result or when its input is closed, also by the death of the process that asked.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any, BinaryIO

_ADDRESS = "RAY_ADDRESS"  # of a cluster, by Ray's own convention
_MOST_BLOCKS = 20_000


def main() -> None:
    """Run the job on the standard input; results, each as `(failed, result)`, go to the standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, which closes the input
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray or anyone prints is no result
    job = pickle.load(sys.stdin.buffer)
    status = 1
    try:
        import ray

        stop = _Stop()
        try:
            logging.getLogger("ray").setLevel(logging.ERROR)  # progress is the asker's, and errors come back as values
            stop.listen()
            threading.Thread(target=_watch, args=(sys.stdin.buffer,), daemon=True).start()
            _start(ray, job)
            stop.listen()  # again: Ray has set its own
            for result in _results(ray, job):
                _send(results, result)
            status = 0
        except BrokenPipeError:
            pass  # no one listens any more
        except Exception as error:
            _send(results, pickle.dumps((True, _plain(error))))
        finally:
            stop.working = False
            ray.shutdown()
    finally:
        os._exit(status)  # past Ray's own threads, which outlive it


class _Stop:
    """Ends the work at the first SIGTERM, and is deaf to it afterwards: a cluster half ended leaves processes behind."""

    def __init__(self) -> None:
        self.working = True

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: Any) -> None:
        if self.working:
            self.working = False
            raise SystemExit


def _send(results: BinaryIO, result: bytes) -> None:
    pickle.dump(result, results)
    results.flush()


def _watch(asker: BinaryIO) -> None:
    """End this process when the one that asks has closed its end."""
    while asker.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _results(ray: Any, job: dict[str, Any]) -> Iterator[bytes]:
    import_module("ray.data")

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"unit": unit} for unit in job["units"]]
    done = ray.data.from_items(rows, override_num_blocks=min(len(rows), _MOST_BLOCKS))  # a block is what a lost actor costs
    done = done.map_batches(
        Actor,
        fn_constructor_args=(job["work"],),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(_pool(ray.cluster_resources(), job), len(rows))),
        num_cpus=job["threads"],
        num_gpus=job["gpus"],
    )
    for row in done.iter_rows():
        yield row["result"]


def _start(ray: Any, job: dict[str, Any]) -> None:
    """Join the asker's cluster or that of RAY_ADDRESS, or begin one here, open to this machine alone."""
    common = {"log_to_driver": False, "configure_logging": False}
    if job["address"] or os.environ.get(_ADDRESS):
        ray.init(address=job["address"], **common)
        return
    # One more than the actors need: with none left over, reading the list of units would wait for an actor to end.
    wanted = max(job["cores"], (job["actors"] or 1) * job["threads"]) + 1
    ray.init(address="local", num_cpus=wanted, include_dashboard=False, _node_ip_address="127.0.0.1", **common)


def _pool(resources: dict[str, float], job: dict[str, Any]) -> int:
    if job["actors"]:
        return int(job["actors"])
    if job["gpus"]:
        return max(1, int(resources.get("GPU", 0)))
    return max(1, int((resources.get("CPU", 2) - 1) // job["threads"]))


class Actor:
    """A worker in a process of its own. What it raises travels as a value: Ray would wrap it, and retry what cannot succeed."""

    def __init__(self, work: bytes):
        self.work = work
        self.made: Any = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Results of the units of a batch."""
        results = []
        for packed in batch["unit"]:
            try:
                if self.made is None:
                    worker, argument = pickle.loads(self.work)
                    self.made = worker(argument)
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

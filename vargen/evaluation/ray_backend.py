"""The Ray backend, and the child process in which Ray runs: it reads a job from its input and writes results to its output.

The child loads no network: workers and units pass through it as bytes, from the calling process to the actors. It shuts down
its cluster and exits after the last result, or when its input is closed, which also happens if the calling process dies.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO

from vargen.compat import installed_version
from vargen.device import available_cores
from vargen.ray_cluster import SETTINGS, join_or_start_cluster

_MAX_BLOCKS = 20_000


def main() -> None:
    """Run the job on the standard input; results, each as `(failed, result)`, go to the standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the calling process, which then closes the input
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps anything that Ray or others print out of the results
    job = pickle.load(sys.stdin.buffer)
    status = 1
    try:
        import ray

        stop = _SigtermGuard()
        try:
            logging.getLogger("ray").setLevel(logging.ERROR)  # the caller reports progress, and errors are returned as values
            stop.listen()
            threading.Thread(target=_exit_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
            _start(job)
            stop.listen()  # again: Ray has installed its own handler
            for result in _results(ray, job):
                _send(results, result)
            status = 0
        except BrokenPipeError:
            pass  # the caller no longer reads
        except Exception as error:
            _send(results, pickle.dumps((True, _picklable_error(error))))
        finally:
            stop.working = False
            ray.shutdown()
    finally:
        os._exit(status)  # skips Ray's own threads, which would keep it alive


class _SigtermGuard:
    """Stops the work at the first SIGTERM and ignores later ones: interrupting a shutdown would leave processes running."""

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


def _exit_with_parent(asker: BinaryIO) -> None:
    """Exit this process once the caller has closed its end of the pipe."""
    while asker.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _results(ray: Any, job: dict[str, Any]) -> Iterator[bytes]:
    import_module("ray.data")

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"unit": unit} for unit in job["units"]]
    done = ray.data.from_items(rows, override_num_blocks=min(len(rows), _MAX_BLOCKS))  # losing an actor costs one block
    done = done.map_batches(
        Actor,
        fn_constructor_args=(job["work"],),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(_num_actors(ray.cluster_resources(), job), len(rows))),
        num_cpus=job["threads"],
        num_gpus=job["gpus"],
    )
    for row in done.iter_rows():
        yield row["result"]


def _start(job: dict[str, Any]) -> None:
    # One core more than the actors need: otherwise the task that reads the list of units would wait for an actor to end.
    cores = max(job["cores"], (job["actors"] or 1) * job["threads"]) + 1
    join_or_start_cluster(cores, job["address"])


def _num_actors(resources: dict[str, float], job: dict[str, Any]) -> int:
    if job["actors"]:
        return int(job["actors"])
    if job["gpus"]:
        return max(1, int(resources.get("GPU", 0)))
    return max(1, int((resources.get("CPU", 2) - 1) // job["threads"]))


class Actor:
    """A worker in its own process. Exceptions are returned as values: Ray would wrap them, and retry what cannot succeed."""

    def __init__(self, work: bytes):
        self.work = work
        self.made: Any = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the results of the units of a batch."""
        results = []
        for packed in batch["unit"]:
            try:
                if self.made is None:
                    worker, argument = pickle.loads(self.work)
                    self.made = worker(argument)
                answer = (False, self.made(pickle.loads(packed)))
            except Exception as error:
                answer = (True, _picklable_error(error))
            results.append(pickle.dumps(answer))
        return {"result": results}


def _picklable_error(error: Exception) -> Exception:
    """Return the error itself if it can be pickled, else one with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    error.__traceback__ = None
    return error


_SHUTDOWN_SECONDS = 60  # seconds that a child has to shut down its actors


def ray_backend(actors: int | None, device: str, threads: int | None) -> Callable[..., Iterator[Any]]:
    """Create a Ray backend; see `vargen.evaluation.generation.run_locally`.

    Uses the cluster that this process joined by `ray.init`, else that of RAY_ADDRESS, else one started for the call.

    Args:
        actors: size of the pool; by default one per GPU of the cluster, or as many as its cores allow at `threads` each.
        device: `"cuda"` gives each actor its own GPU. threads: CPU threads of an actor, 1 by default.

    Raises:
        ImportError: Ray is not installed. While it runs: RuntimeError if Ray's process exits early.
    """
    if installed_version("ray") is None:
        raise ImportError('engine ray needs Ray: pip install "ray[data,serve]>=2.51"')

    def run(worker: Callable[[Any], Any], argument: Any, units: list[Any]) -> Iterator[Any]:
        if units:
            job = {
                "work": pickle.dumps((worker, argument)),  # unpickled only by the actors
                "units": [pickle.dumps(unit) for unit in units],
                "actors": actors,
                "gpus": 1 if device == "cuda" else 0,
                "threads": threads or 1,
                "cores": available_cores(),
                "address": _current_address(),
            }
            yield from _run(job)

    return run


def _run(job: dict[str, Any]) -> Iterator[Any]:
    # The child imports modules from the same paths as this process, and from no others.
    code = f"import sys; sys.path[:] = {sys.path!r}; from vargen.evaluation.ray_backend import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**SETTINGS, **os.environ},
        start_new_session=True,  # Ctrl-C is for this process, which then stops the child
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        try:
            pickle.dump(job, child.stdin)
            child.stdin.flush()
            for _ in job["units"]:
                failed, result = pickle.loads(pickle.load(child.stdout))
                if failed:
                    raise result
                yield result
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError(
                f"Ray's process ended early, with exit status {child.wait()}; what came back is kept: run the same again. "
                f"Ray's logs are under {os.environ.get('RAY_TMPDIR', 'its folder of temporary files')}"
            ) from error
    finally:
        _shut_down(child)


def _shut_down(child: subprocess.Popen[bytes]) -> None:
    """Signal the child to shut down its cluster, by closing its input, and wait for it."""
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # it exited before it had read its job
                pipe.close()
    try:
        child.wait(_SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.returncode and os.name == "posix":  # it could not shut down its cluster itself
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _current_address() -> str | None:
    """Return the address of the cluster that this process has joined."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else None

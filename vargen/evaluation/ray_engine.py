"""Units of work on many processes and machines, by Ray Data: a pool of actors, each of which opens its networks once.

Ray runs in a child process (`vargen.evaluation.ray_driver`): in the one that asks it leaves a thread behind for each run that
ends by an error, and was seen to end that process later, without a word. Here such an end is an error.

Actors write pictures; what they measured comes back to this process, which alone writes the manifest. An actor that dies is
replaced and its unit done again, so a picture may be drawn twice and is then the same; a line of the manifest is written once.
If this process or the child dies, the manifest has all that came back, and the next call goes on from it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from vargen.compat import installed_version
from vargen.device import available_cores

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}  # sends nothing to anyone, and logs into its files
_PATIENCE = 60  # seconds in which a child that is told to end may end its actors


def ray_engine(actors: int | None, device: str, threads: int | None) -> Callable[..., Iterator[Any]]:
    """An engine; see `vargen.evaluation.drawing.locally`.

    The cluster is the one that this process has joined by `ray.init`, else the one of RAY_ADDRESS, else one begun for the call.

    Args:
        actors: in the pool; by default one for each GPU of the cluster, or for each so many cores as an actor has threads.
        device: `"cuda"` gives each actor a GPU of its own. threads: CPU threads of an actor, 1 by default.

    Raises:
        ImportError: without Ray. While it runs: RuntimeError if Ray's process ends early.
    """
    if installed_version("ray") is None:
        raise ImportError('engine ray needs Ray: pip install "ray[data,serve]>=2.51"')

    def run(worker: Callable[[Any], Any], argument: Any, units: list[Any]) -> Iterator[Any]:
        if units:
            job = {
                "work": pickle.dumps((worker, argument)),  # which the actors alone read
                "units": [pickle.dumps(unit) for unit in units],
                "actors": actors,
                "gpus": 1 if device == "cuda" else 0,
                "threads": threads or 1,
                "cores": available_cores(),
                "address": _joined(),
            }
            yield from _run(job)

    return run


def _run(job: dict[str, Any]) -> Iterator[Any]:
    # The child finds modules where this process does, and nowhere else.
    code = f"import sys; sys.path[:] = {sys.path!r}; from vargen.evaluation.ray_driver import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**_QUIET, **os.environ},
        start_new_session=True,  # Ctrl-C is for this process, which then tells the child
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
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Tell the child to end its cluster, by closing what it reads, and wait for it."""
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # it ended before it had read its job
                pipe.close()
    try:
        child.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.returncode and os.name == "posix":  # it could not end its cluster itself
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _joined() -> str | None:
    """The address of the cluster that this process has joined."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else None

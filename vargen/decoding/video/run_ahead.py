"""Generation of the next block while the latest one is decoded and scored.

As soon as there are latents of a block, drafted or finished, a worker thread generates the block after them; on CUDA, on a
stream of its own. If the latents become the finished block, its work is adopted; otherwise it is discarded. It runs the passes
that would otherwise run later, on the same inputs, so nothing that is generated changes by a bit.

One block ahead is all that helps: a worker that is two ahead has drafted faster than blocks are decoded and scored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vargen.decoding.video.denoising import BlockGenerator
from vargen.decoding.video.stats import VideoStats
from vargen.device import available_cores, limit_threads, load_average


class StopRequested(Exception):
    """A callback or `cancel` ends the run."""


def has_cores(device: torch.device, threads: int) -> bool:
    """Return whether a CPU has cores for a second set of threads; False for other devices, which were not measured."""
    return device.type == "cpu" and available_cores() >= 2 * threads


def pays_off(device: torch.device, threads: int) -> bool:
    """Return whether to run ahead by default: on a CPU with cores for a second set of threads, which nothing else uses.

    On two cores with a load of 7, videos of the packaged model took 0.95 to 1.26 times as long; see
    benchmarks/video_run_ahead_emoji_xeon-amx-2-cores_2026-11-25.md.
    """
    return has_cores(device, threads) and available_cores() - (load_average() or 0.0) >= threads


class AheadBlock(NamedTuple):
    """A block that was generated ahead.

    Attributes:
        latents: as `BlockGenerator.generate` returns them.
        commit_seconds, seconds: of the cache update, and of the denoising steps.
        seconds_hidden: what of them was not waited for.
    """

    latents: Tensor
    commit_seconds: float
    seconds: float
    seconds_hidden: float = 0.0


@dataclass
class _Task:
    """The block after `latents`, which `fork` generates for `generator` with `last` steps."""

    generator: BlockGenerator
    latents: Tensor
    last: int | None
    fork: BlockGenerator
    undo: Callable[[], None]
    stop: threading.Event
    result: Future[AheadBlock]


class RunAhead:
    """The worker of one video, and the block that it generates.

    Args:
        stats: of the video; what is discarded is counted there.
    """

    def __init__(self, device: torch.device, stats: VideoStats):
        self.device, self.stats = device, stats
        self._task: _Task | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="vargen-run-ahead")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, generator: BlockGenerator, latents: Tensor, noise: Callable[[int], Tensor], last: int | None) -> None:
        """Generate the block after `latents` with the current number of threads, unless that has been started.

        Args:
            noise, last: as in `BlockGenerator.generate`.
        """
        if self._task is not None and self._task.latents is latents:
            return
        self.discard()
        if not generator.can_fork():
            return
        stop = threading.Event()

        def after_pass() -> None:
            if stop.is_set():
                raise StopRequested

        fork, undo = generator.fork(latents, after_pass)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        result = self._pool.submit(_generate, fork, noise, last, torch.get_num_threads(), self._stream)
        self._task = _Task(generator, latents, last, fork, undo, stop, result)

    def take(self, generator: BlockGenerator, latents: Tensor | None, last: int | None) -> AheadBlock | None:
        """Return the block after `latents` if the worker generates it; wait for it, and adopt its work.

        Otherwise return None: `generator` can run. The worker stops, as its block is not needed.

        Raises:
            Exception: of the worker.
        """
        task = self._task
        if task is None:
            return None
        if task.generator is not generator or task.latents is not latents or task.last != last:
            self.abandon()
            if task.generator.context is generator.context:
                self.discard()
            return None
        started = time.perf_counter()
        error = task.result.exception()
        waited = time.perf_counter() - started
        self._task = None
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            for tensor in (*task.fork.estimates, task.fork.noisy):
                if tensor is not None:  # an error in the cache update leaves none
                    tensor.record_stream(current)
        generator.adopt(task.fork)
        if error is not None:
            raise error
        found = task.result.result()
        return found._replace(seconds_hidden=max(0.0, found.commit_seconds + found.seconds - waited))

    def abandon(self) -> None:
        """Make the worker stop after its current pass, without waiting for it."""
        if self._task is not None:
            self._task.stop.set()

    def discard(self) -> None:
        """Stop the worker, wait for it, and undo its passes."""
        task = self._task
        if task is None:
            return
        task.stop.set()
        wait([task.result])  # an error does not count: without the worker, these passes would not have run
        task.undo()
        self._task = None
        self.stats.blocks_discarded += 1
        self.stats.passes_discarded += task.fork.passes

    def close(self) -> None:
        """End the worker."""
        self.discard()
        self._pool.shutdown()

    def __del__(self) -> None:
        self.abandon()  # of a video that is neither finished nor closed; the thread ends with its pool


def _generate(
    fork: BlockGenerator, noise: Callable[[int], Tensor], last: int | None, threads: int, stream: torch.cuda.Stream | None
) -> AheadBlock:
    with torch.no_grad(), limit_threads(threads), _use_stream(stream):
        started = time.perf_counter()
        fork.update_cache()
        updated = time.perf_counter()
        latents = fork.generate(noise, last=last)
    return AheadBlock(latents, updated - started, time.perf_counter() - updated)


@contextmanager
def _use_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on a stream, and wait at the end until its work is done."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()

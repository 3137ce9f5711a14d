"""State of a pipeline's running calls: one per call, so that calls in several threads do not interfere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Call:
    """Per-call state that diffusers keeps in the pipeline: guidance scale, maximum number of steps, and the interrupt flag."""

    guidance_scale: float = 1.0
    num_timesteps: int = 0
    interrupt: bool = False


class Calls:
    """The running calls of a pipeline. A copy or a pickle of the pipeline starts with none."""

    def __init__(self) -> None:
        self._lock, self._own = threading.Lock(), threading.local()
        self._running: list[Call] = []
        self._last = Call()

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()

    @contextmanager
    def started(self, guidance_scale: float, num_timesteps: int) -> Iterator[Call]:
        """Register a call of this thread while the block runs."""
        call, outer = Call(guidance_scale, num_timesteps), getattr(self._own, "call", None)
        with self._lock:
            self._running.append(call)
        self._own.call = call
        try:
            yield call
        finally:
            self._own.call = outer
            with self._lock:
                self._running = [other for other in self._running if other is not call]
                self._last = call

    @property
    def current(self) -> Call:
        """This thread's call; without one, the running call that started last, or else the call that ended last."""
        own: Call | None = getattr(self._own, "call", None)
        with self._lock:
            return own or (self._running or [self._last])[-1]

    def interrupt(self, value: bool) -> None:
        """Set `interrupt` of this thread's call (as in a callback); in a thread without a call, of all running calls."""
        own: Call | None = getattr(self._own, "call", None)
        with self._lock:
            for call in self._running if own is None else [own]:
                call.interrupt = value

"""The calls of a pipeline that run: each has a state of its own, and those of several threads know nothing of each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Call:
    """What diffusers keeps in the pipeline itself: guidance scale, steps at most, and whether the call is to end early."""

    guidance_scale: float = 1.0
    num_timesteps: int = 0
    interrupt: bool = False


class Calls:
    """The calls of one pipeline that run. A copy or a pickle of the pipeline begins with none."""

    def __init__(self) -> None:
        self._lock, self._own = threading.Lock(), threading.local()
        self._running: list[Call] = []
        self._last = Call()

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()

    @contextmanager
    def started(self, guidance_scale: float, num_timesteps: int) -> Iterator[Call]:
        """A call of this thread, for as long as the block runs."""
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
        """That of this thread; in a thread that makes none, the one that began last of those that run, or else ended last."""
        own: Call | None = getattr(self._own, "call", None)
        with self._lock:
            return own or (self._running or [self._last])[-1]

    def interrupt(self, value: bool) -> None:
        """Set `interrupt` of this thread's call, as a callback does; in a thread that makes none, of all calls that run."""
        own: Call | None = getattr(self._own, "call", None)
        with self._lock:
            for call in self._running if own is None else [own]:
                call.interrupt = value

"""What the calls of an enabled object did: passes, tokens per pass, seconds, and how the images relate to those of `ar`."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vargen.decoding import DecodeStats


@dataclass
class Summary:
    """Statistics of the calls of an enabled model or pipeline.

    Attributes:
        method: an `Accelerator`, `ScaleSchedule` or `VideoMethod`.
        last, total: `DecodeStats` of the last accelerated call, and of all; None before the first.
        calls: number of accelerated calls.
        original: number of image calls that the original `generate` ran, by reason.
    """

    method: Any
    last: Any = None
    total: Any = None
    calls: int = 0
    original: Counter[str] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def add(self, stats: Any) -> None:
        """Count an accelerated call, unless it was by another method, which a call of a pipeline may name."""
        if stats.accelerator != self.method.name:
            return
        with self._lock:
            self.calls += 1
            self.last = stats
            if isinstance(stats, DecodeStats):
                self.total = stats if self.total is None else DecodeStats.merge([self.total, stats])
                self.total.seeds, self.total.relaxation = [], [sum(self.total.relaxation)]

    def add_original(self, reason: str) -> bool:
        """Count a call that the original `generate` runs; returns whether it is the first for this reason."""
        with self._lock:
            self.original[reason] += 1
            return self.original[reason] == 1

    @property
    def promise(self) -> str:
        """How an image relates to that of `ar` with the same seed."""
        if self.method.sequential_tokens:
            return "the same image as ar in float32"
        if self.method.kind == "exact":
            return "another image than ar, from the same distribution"
        spent = getattr(self.total, "relaxation_per_token", None)
        return "relaxed" if spent is None else f"relaxed: {spent:.3f} acceptance probability per token beyond the exact rule"

    def __str__(self) -> str:
        """Lines for people: the method and its promise, the last call, all calls."""
        lines = [f"{self.method.name}: {self.promise}"]
        if self.last is not None:
            lines.append(f"last call: {_describe(self.last)}")
        if self.calls > 1:
            lines.append(f"all {self.calls} calls: {_describe(self.total or self.last)}")
        lines += [f"{count} by the original generate, because {reason}" for reason, count in self.original.items()]
        return "\n".join(lines if len(lines) > 1 else [*lines, "no image yet"])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


def _describe(stats: Any) -> str:
    if not isinstance(stats, DecodeStats):
        return str(stats)
    rate = f"{stats.passes} passes, {stats.tokens_per_pass:.1f} tokens per pass, {stats.seconds:.1f} s"
    return f"{rate}, {stats.images} image{'s' * (stats.images != 1)}"

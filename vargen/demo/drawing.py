"""A drawing: under way, where one thread writes and the page reads, and finished."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from vargen.decoding import DecodeStats
from vargen.demo.settings import Settings


@dataclass(frozen=True)
class Drawn:
    """A finished or stopped drawing.

    Attributes:
        settings: what was asked for.
        images: the pictures; white where nothing was drawn.
        tokens: int64, a row or a grid per picture.
        stats: of the decoding loop.
        seconds: of the loop, less what previews took.
        stopped: whether it was stopped before the end.
        told: for each picture, its seed and how it was scored; see `DecodeStats.picture`.
    """

    settings: Settings
    images: list[Image.Image]
    tokens: torch.Tensor
    stats: DecodeStats
    seconds: float
    stopped: bool
    told: list[dict[str, Any]]

    @property
    def tokens_per_second(self) -> float:
        return self.stats.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def relaxation_per_token(self) -> float:
        """Acceptance granted beyond the exact rule's, per token."""
        return self.stats.relaxation_per_token


@dataclass
class Run:
    """A drawing under way: a thread writes, the page reads.

    Attributes:
        settings: what was asked for.
        total: tokens of a picture.
        stop: set to end it within one pass.
        done: set when `drawn` or `error` is there.
        counts: tokens that each pass committed to the slowest picture of the batch.
        preview: the newest partial pictures, WebP files; transparent where nothing is drawn.
    """

    settings: Settings
    total: int
    stop: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    counts: list[int] = field(default_factory=list)
    preview: list[bytes] = field(default_factory=list)
    drawn: Drawn | None = None
    error: BaseException | None = None
    started: float = 0.0
    aside: float = 0.0
    tokens: int = 0

    @property
    def seconds(self) -> float:
        """Spent drawing so far, previews left out."""
        if self.drawn is not None:
            return self.drawn.seconds
        return time.perf_counter() - self.started - self.aside if self.started else 0.0

    def result(self) -> Drawn:
        """Wait for the end. Raises what the drawing raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.drawn is not None
        return self.drawn

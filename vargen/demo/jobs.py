"""Who is drawing what: tickets that let a Stop button, or a closed page, reach a drawing that waits or runs."""

from __future__ import annotations

import html
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import gradio as gr
import torch
from PIL import Image

from vargen.decoding import DecodeStats, NonFiniteLogitsError
from vargen.demo.request import Settings

logger = logging.getLogger("vargen")


@dataclass
class Ticket:
    """One press of a button, or other start; `kind` tells those of one place of the page from others."""

    session: str
    kind: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    started: bool = False


class Runs:
    """The tickets of all sessions, by an id that cannot be guessed."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tickets)

    def begin(self, session: str, kind: str = "") -> str:
        """A new ticket; returns its id."""
        number = secrets.token_hex(8)
        with self._lock:
            self._tickets[number] = Ticket(session, kind)
        return number

    def start(self, number: str) -> Ticket | None:
        """The ticket whose turn has come; None if it was stopped while it waited, or was never given out."""
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is not None:
                ticket.started = True
            return ticket

    def stop(self, number: str) -> bool:
        """Ask a drawing to stop; True if it was still waiting, and now never starts."""
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is None:
                return False
            ticket.stop.set()
            if not ticket.started:
                del self._tickets[number]
            return not ticket.started

    def end(self, number: str) -> None:
        """The drawing is over."""
        with self._lock:
            self._tickets.pop(number, None)

    def leave(self, session: str) -> None:
        """Stop everything of a session whose page was closed."""
        self._stop([number for number, ticket in self._listed() if ticket.session == session])

    def stop_all(self, session: str, kind: str) -> None:
        """Stop what a session began of one kind."""
        self._stop([number for number, ticket in self._listed() if (ticket.session, ticket.kind) == (session, kind)])

    def _listed(self) -> list[tuple[str, Ticket]]:
        with self._lock:
            return list(self._tickets.items())

    def _stop(self, numbers: list[str]) -> None:
        for number in numbers:
            self.stop(number)


@contextmanager
def told_plainly() -> Iterator[None]:
    """Turn what goes wrong into a message for the person in front of the page; tracebacks go to the log only."""
    try:
        yield
    except gr.Error:
        raise
    except (ValueError, NonFiniteLogitsError, torch.OutOfMemoryError) as error:
        raise gr.Error(html.escape(str(error), quote=False), print_exception=False) from None
    except Exception as error:
        logger.exception("a drawing failed")
        message = "The drawing failed for a reason that this page does not know; the server's log has it. Please try again."
        raise gr.Error(message, print_exception=False) from error


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

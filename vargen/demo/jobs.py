"""Jobs of the visitors: tickets let a Stop button, or a closed page, cancel a run that waits or is active."""

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
    """One request to start a run; `kind` identifies the part of the page that made it."""

    session: str
    kind: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    started: bool = False


class Runs:
    """The tickets of all sessions, by an unguessable id."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tickets)

    def begin(self, session: str, kind: str = "") -> str:
        """Create a ticket; returns its id."""
        number = secrets.token_hex(8)
        with self._lock:
            self._tickets[number] = Ticket(session, kind)
        return number

    def start(self, number: str) -> Ticket | None:
        """Return the ticket whose turn has come; None if it was stopped while waiting, or never existed."""
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is not None:
                ticket.started = True
            return ticket

    def stop(self, number: str) -> bool:
        """Request that a run stop; True if it was still waiting and now never starts."""
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is None:
                return False
            ticket.stop.set()
            if not ticket.started:
                del self._tickets[number]
            return not ticket.started

    def end(self, number: str) -> None:
        """Remove the ticket of a finished run."""
        with self._lock:
            self._tickets.pop(number, None)

    def leave(self, session: str) -> None:
        """Stop all runs of a session whose page was closed."""
        self._stop([number for number, ticket in self._listed() if ticket.session == session])

    def stop_all(self, session: str, kind: str) -> None:
        """Stop all runs of one kind in a session."""
        self._stop([number for number, ticket in self._listed() if (ticket.session, ticket.kind) == (session, kind)])

    def _listed(self) -> list[tuple[str, Ticket]]:
        with self._lock:
            return list(self._tickets.items())

    def _stop(self, numbers: list[str]) -> None:
        for number in numbers:
            self.stop(number)


@contextmanager
def told_plainly() -> Iterator[None]:
    """Turn exceptions into messages for the user of the page; tracebacks go only to the log."""
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
    """The result of a run that finished or was stopped.

    Attributes:
        settings: of the request.
        images: white where no token was generated.
        tokens: int64, a row or a grid per image.
        stats: of the decoding loop.
        seconds: time of the loop, without previews.
        stopped: whether the run was stopped before its end.
        told: for each image, its seed and scores; see `DecodeStats.picture`.
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
        """Acceptance in excess of the exact rule, per token."""
        return self.stats.relaxation_per_token


@dataclass
class Run:
    """An active run: a thread writes, the page reads.

    Attributes:
        settings: of the request.
        total: tokens per image.
        stop: set it to end the run within one pass.
        done: set when `drawn` or `error` is available.
        counts: tokens that each pass committed in the slowest image of the batch.
        preview: the latest partial images, as WebP files; transparent where no token exists yet.
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
        """Generation time so far, without previews."""
        if self.drawn is not None:
            return self.drawn.seconds
        return time.perf_counter() - self.started - self.aside if self.started else 0.0

    def result(self) -> Drawn:
        """Wait for the end and return the result. Raises the exception of the run, if any."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.drawn is not None
        return self.drawn

"""Who is drawing what: tickets that let a Stop button, or a closed page, reach a drawing that waits or runs."""

from __future__ import annotations

import html
import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import gradio as gr
import torch

from vargen.decoding import NonFiniteLogitsError

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

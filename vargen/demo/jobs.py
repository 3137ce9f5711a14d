"""Jobs of the visitors: tickets let a Stop button, or a closed page, cancel a job that waits or runs."""

from __future__ import annotations

import html
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gradio as gr
import torch
from PIL import Image

from vargen.decoding import DecodeStats, NonFiniteLogitsError
from vargen.demo.rendering import ResultCard, status_line
from vargen.demo.request import PageRequest, new_seed

if TYPE_CHECKING:
    from vargen.demo.inputs import Subject

logger = logging.getLogger("vargen")

POLL_SECONDS = 0.25  # how often the page looks at a running job
# For immediate events that may report an error: gradio delivers messages to the page only through the queue.
QUEUED_EVENT: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
PUSH_LINK = "(link) => { window.vargen.push(link); }"  # the address of the page becomes that of the latest job
# For jobs: gradio shows the place in the queue and the expected seconds while one waits.
WAITING: dict[str, Any] = {"show_progress": "minimal"}
# For events that only update the page.
INSTANT_EVENT: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


@dataclass(eq=False)
class Ticket:
    """One request to start a job; `kind` identifies the part of the page that made it."""

    session: str
    kind: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    started: bool = False


class JobRegistry:
    """The tickets of all sessions, by an unguessable id."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tickets)

    def enqueue(self, session: str, kind: str = "") -> str:
        """Create a ticket; returns its id."""
        number = secrets.token_hex(8)
        with self._lock:
            self._tickets[number] = Ticket(session, kind)
        return number

    def find(self, number: str) -> Ticket | None:
        """Return a ticket that waits or runs."""
        with self._lock:
            return self._tickets.get(number)

    def start(self, number: str) -> Ticket | None:
        """Return the ticket whose turn has come; None if it was stopped while waiting, or never existed."""
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is not None:
                ticket.started = True
            return ticket

    def stop(self, number: str) -> bool:
        """Request that a job stop; True if it was still waiting and now never starts."""
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is None:
                return False
            ticket.stop.set()
            if not ticket.started:
                del self._tickets[number]
            return not ticket.started

    def end(self, number: str) -> None:
        """Remove the ticket of a finished job."""
        with self._lock:
            self._tickets.pop(number, None)

    def stop_visitor_jobs(self, session: str, kind: str | None = None) -> None:
        """Stop all jobs of a session, or those of one kind."""
        for number, ticket in self._snapshot():
            if ticket.session == session and kind in (None, ticket.kind):
                self.stop(number)

    def _snapshot(self) -> list[tuple[str, Ticket]]:
        with self._lock:
            return list(self._tickets.items())


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn exceptions into messages for the user of the page; tracebacks go only to the log."""
    try:
        yield
    except gr.Error:
        raise
    except (ValueError, NonFiniteLogitsError, torch.OutOfMemoryError) as error:
        raise gr.Error(html.escape(str(error), quote=False), print_exception=False) from None
    except Exception as error:
        logger.exception("a job failed")
        message = "The generation failed; the server's log has the reason. Please try again."
        raise gr.Error(message, print_exception=False) from error


@dataclass(frozen=True)
class JobResult:
    """The result of a job that finished or was stopped.

    Attributes:
        request: that started it.
        images: white where no token was generated.
        tokens: int64, a row or a grid per image.
        stats: of the decoding loop.
        seconds: time of the loop, without previews.
        stopped: whether the job was stopped before its end.
        records: for each image, its seed and scores.
    """

    request: PageRequest
    images: list[Image.Image]
    tokens: torch.Tensor
    stats: DecodeStats
    seconds: float
    stopped: bool
    records: list[dict[str, Any]]

    @property
    def tokens_per_second(self) -> float:
        return self.stats.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def relaxation_per_token(self) -> float:
        """Acceptance in excess of the exact rule, per token."""
        return self.stats.relaxation_per_token


@dataclass
class Job:
    """A generation in progress: a thread writes, the page reads.

    Attributes:
        request: that started it.
        total: tokens per image.
        stop: set it to end the job within one pass.
        done: set when `finished` or `error` is available.
        counts: tokens that each pass committed in the slowest image of the batch.
        preview: the latest partial images, as WebP files; transparent where no token exists yet.
    """

    request: PageRequest
    total: int
    stop: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    counts: list[int] = field(default_factory=list)
    preview: list[bytes] = field(default_factory=list)
    finished: JobResult | None = None
    error: BaseException | None = None
    started: float = 0.0
    preview_seconds: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / len(self.counts) if self.counts else 0.0

    @property
    def seconds(self) -> float:
        """Generation time so far, without previews."""
        if self.finished is not None:
            return self.finished.seconds
        return time.perf_counter() - self.started - self.preview_seconds if self.started else 0.0

    def result(self) -> JobResult:
        """Wait for the end and return the result. Raises the exception of the job, if any."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.finished is not None
        return self.finished


def job_card(name: str, tag: str, job: Job | None, total: int, caption: str = "", badge: str = "") -> ResultCard:
    """Describe a job for display, also one that waits (None), runs, or was stopped; `caption` is for one that finished."""
    if job is None:
        return ResultCard(name, tag, None, "waiting", "", 0, total, 0.0, 0.0)
    result = job.finished
    image: Any = job.preview[0] if job.preview else None
    if result is None:
        caption = f"{job.seconds:.1f} s"
    elif result.stopped:
        caption = f"stopped after {result.seconds:.1f} s"
    else:
        image = result.images[0]
    done = result is not None and not result.stopped
    return ResultCard(name, tag, image, caption, badge, job.tokens, total, job.seconds, job.tokens_per_pass, done)


def stream_job(registry: JobRegistry, number: str, run: Callable[[Ticket], Iterator[list[Any]]]) -> Iterator[list[Any]]:
    """Run a ticket whose turn has come; nothing happens if it was stopped while waiting. At the end it stops and is removed."""
    if (ticket := registry.start(number)) is None:
        return
    try:
        with user_errors():
            yield from run(ticket)
    finally:
        ticket.stop.set()
        registry.end(number)


def set_idle() -> list[Any]:
    """Return the updates that enable the start button and disable the stop button."""
    return [gr.Button(interactive=True), gr.Button(interactive=False)]


@dataclass(frozen=True)
class JobControls:
    """What a mode that generates has, in addition to its start and stop buttons: a status line, and its inputs and outputs.

    Attributes:
        inputs: read in addition to those of the subject. state: only passed to the job. outputs: that the job updates.
    """

    note: gr.HTML
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    state: Sequence[Any] = ()


def connect_job(
    registry: JobRegistry,
    subject: Subject,
    mode: str,
    controls: JobControls,
    check: Callable[..., str],
    run: Callable[..., Iterator[list[Any]]],
    queue_options: dict[str, Any],
    on_stop: Callable[[str], object] = lambda number: None,
) -> gr.Textbox:
    """Connect the start and stop buttons of a mode.

    Args:
        check: called with the values of the subject and the own inputs; returns the link to the result, or raises ValueError
            for what cannot be started.
        run: called with a ticket, the same values and the state when the turn has come; yields the status line and outputs.
        on_stop: called with the id of the ticket whose stop button was pressed.

    Returns:
        the component that holds the id of the latest ticket.
    """
    buttons = subject.buttons[mode]
    ticket, link = gr.Textbox(visible=False), gr.Textbox(visible=False)

    def start_clicked(request: gr.Request, *values: Any) -> list[Any]:
        *own, locked, once = values
        with user_errors():
            if not locked and not once:
                own[subject.seed_index] = new_seed()
            address = check(*own)
        number = registry.enqueue(request.session_hash or "")
        pressed = [gr.Button(interactive=False), gr.Button(interactive=True)]
        return [number, address, own[subject.seed_index], False, *pressed, status_line("Waiting for other jobs …")]

    def run_job(number: str, *values: Any) -> Iterator[list[Any]]:
        yield from stream_job(registry, number, lambda each: run(each, *values))

    def stop_clicked(number: str) -> list[Any]:
        on_stop(number)
        if registry.stop(number):
            return [status_line("Removed from the queue."), *set_idle()]
        return [gr.skip(), gr.skip(), gr.Button(interactive=False)]  # the job itself says when it has stopped

    values, both = [*subject.values, *controls.inputs], [buttons.start, buttons.stop]
    started = buttons.start.click(
        start_clicked,
        [*values, subject.lock, subject.once],
        [ticket, link, subject.seed, subject.once, *both, controls.note],
        trigger_mode="once",
        **QUEUED_EVENT,
    )
    started.success(None, link, None, js=PUSH_LINK, api_visibility="private")
    running = started.success(
        run_job,
        [ticket, *values, *controls.state],
        [controls.note, *controls.outputs],
        **WAITING,
        show_progress_on=controls.note,
        **queue_options,
    )
    running.then(set_idle, None, both, **INSTANT_EVENT)
    running.failure(lambda: status_line("Not finished.", "off"), None, controls.note, **INSTANT_EVENT)
    buttons.stop.click(stop_clicked, ticket, [controls.note, *both], **INSTANT_EVENT)
    return ticket

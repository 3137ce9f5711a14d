"""Calls of pipelines in worker threads, which a visitor watches and may stop; and files of what they generated."""

from __future__ import annotations

import html
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from gradio.utils import get_upload_folder
from PIL import Image

from vargen.decoding import NonFiniteLogitsError
from vargen.pipelines.base import VisualPipeline

logger = logging.getLogger("vargen")

_POLL_SECONDS = 0.25  # how often gradio can end the generator of a visitor who left
_PREVIEW_SECONDS, _PREVIEW_RATIO = 0.25, 4  # between previews, which take at most a fifth of the time
# Threads are used again: a pipeline keeps the buffers of its passes, and torch its own threads, for each of them.
_workers = ThreadPoolExecutor(max_workers=16, thread_name_prefix="generate")


@dataclass(frozen=True)
class Progress:
    """How far a call is.

    Attributes:
        images: partial ones, transparent where no token exists; in the end, the finished ones.
        tokens, passes: so far, of an image. seconds: so far, without the previews.
        result: what the pipeline returned; None before the end.
    """

    images: Sequence[Image.Image]
    tokens: int
    passes: int
    seconds: float
    result: Any = None


def watch(work: Callable[[Callable[[Any], None], threading.Event], None]) -> Iterator[Any]:
    """Run `work` in a worker thread, and yield what it reports; None where it reported nothing for a quarter of a second.

    Args:
        work: is given a function that reports, and an event which is set when the iterator is closed.
    """
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stopped, end = threading.Event(), object()

    def run() -> None:
        try:
            work(reports.put, stopped)
        finally:
            reports.put(end)

    future = _workers.submit(run)
    try:
        while True:
            try:
                report = reports.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                yield None
                continue
            if report is end:
                break
            yield report
        future.result()
    finally:
        stopped.set()


def generate(
    pipe: VisualPipeline, subject: str, seeds: Sequence[int], previews: bool = True, **options: Any
) -> Iterator[Progress | None]:
    """Generate an image for each seed; closing the iterator ends the call within one pass.

    Args:
        subject: the prompt, or a class by its name or number. previews: whether to decode partial images.
        options: of the call of the pipeline.
    """

    def work(report: Callable[[Any], None], stopped: threading.Event) -> None:
        preview_seconds, due = 0.0, 0.0
        start = time.perf_counter()

        def after_pass(_: Any, step: int, tokens: int, tensors: dict[str, Any]) -> dict[str, Any]:
            nonlocal preview_seconds, due
            began = time.perf_counter()
            if previews and began > due and not stopped.is_set():
                images = pipe.preview(tensors["latents"], tokens)
                report(Progress(images, tokens, step + 1, began - start - preview_seconds))
                took = time.perf_counter() - began
                preview_seconds += took
                due = began + took + max(_PREVIEW_SECONDS, _PREVIEW_RATIO * took)
            return {"stop": stopped.is_set()}

        result = pipe(
            **_name_subject(pipe, subject),
            num_images_per_prompt=len(seeds),
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            callback_on_step_end=after_pass,
            **options,
        )
        stats = result.stats
        report(Progress(result.images, pipe.num_tokens, stats.passes, stats.seconds - preview_seconds, result))

    yield from watch(work)


def _name_subject(pipe: VisualPipeline, subject: str) -> dict[str, Any]:
    if not pipe.is_class_conditional:
        return {"prompt": subject}
    return {"class_labels": int(subject) if subject.isdecimal() else subject}


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn exceptions into messages for the visitor; tracebacks go only to the log."""
    try:
        yield
    except gr.Error:
        raise
    except (ValueError, NonFiniteLogitsError, torch.OutOfMemoryError) as error:
        raise gr.Error(html.escape(str(error), quote=False), print_exception=False) from None
    except Exception as error:
        logger.exception("a call failed")
        raise gr.Error("The generation failed; the server's log has the reason.", print_exception=False) from error


def new_file(name: str) -> Path:
    """Return where to write a file of this name: in a new folder of gradio's cache, which deletes it after a day."""
    folder = Path(get_upload_folder()) / secrets.token_hex(8)
    folder.mkdir(parents=True)
    return folder / name

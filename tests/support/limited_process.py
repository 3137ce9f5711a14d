"""Functions in a process of their own with 10 seconds and 2 GB: what hangs, exhausts memory or aborts harms no test run."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vargen
from vargen.decoding import NonFiniteLogitsError

SECONDS, BYTES = 10, 2 * 2**30
_server = multiprocessing.get_context("forkserver")
# Installed packages, so that a process starts in milliseconds: the server does not see the folders of tests.
_server.set_forkserver_preload(
    [
        "vargen.pipelines.loading",
        "vargen.pipelines.language_model",
        "transformers.models.janus.modeling_janus",
        "transformers.models.janus.processing_janus",
        "transformers.models.llama.tokenization_llama_fast",
        "transformers.models.t5.modeling_t5",
    ]
)


def _run(connection: Any, function: Callable[..., Any], arguments: Any, options: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS)
    try:
        found = function(*arguments, **options)
        connection.send(("returned", found))
    except BaseException as error:
        connection.send((type(error).__name__, str(error)))


def run_limited(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, Any]:
    """Return `("returned", value)`, the name and the message of an error, or `"died"` and the exit code of the process."""
    here, there = _server.Pipe(duplex=False)
    process = _server.Process(target=_run, args=(there, function, arguments, options))
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(SECONDS + 30) else ("died", "no answer")
    except EOFError:
        process.join(5)
        found = ("died", process.exitcode)
    process.kill()
    process.join()
    return found


def open_and_sample(folder: str, **options: Any) -> list[Any]:
    """Open a folder and return the tokens of an image or a sum of latents, the same for the same weights and tokenizer."""
    import torch

    from vargen.pipelines.loading import open_pipeline

    pipe = open_pipeline(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    if pipe.fps is not None:
        result = pipe("a red apple", num_blocks=1, accelerator="target", output_type="latent", generator=torch.Generator())
        return [round(float(result.frames.double().sum()), 2)]
    return pipe("a red apple", temperature=0, output_type="latent").images[0].flatten().tolist()


def open_changed(
    folder: str, copy: str, file: str, place: tuple[Any, ...], values: tuple[Any, ...], options: dict[str, Any]
) -> list[tuple[Any, list[str]]]:
    """Open a copy of a folder in which one setting has another value, for each of some values.

    Returns what `open_and_sample` does or the line of an error, and the files outside of the folder that were opened.
    """
    shutil.copytree(folder, copy, copy_function=os.link)
    Path(copy, file).unlink()
    content = part = json.loads(Path(folder, file).read_text())
    for key in place[:-1]:
        part = part[key]
    package = str(Path(vargen.__file__).parents[1])
    known = (copy, package, sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev/null", "/usr/share")
    foreign: list[str] = []

    def record(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            opened = os.path.abspath(os.fsdecode(arguments[0]))
            if not opened.startswith(known) and "vargen-" not in opened:
                foreign.append(opened)

    tempfile.gettempdir()  # tries the folder with a file, once a process
    sys.addaudithook(record)
    found: list[tuple[Any, list[str]]] = []
    for value in values:
        part[place[-1]] = value
        Path(copy, file).write_text(json.dumps(content))
        signal.alarm(SECONDS)
        try:
            answer: Any = open_and_sample(copy, **options)
        except (ValueError, TypeError, ImportError, NonFiniteLogitsError) as error:
            answer = f"{type(error).__name__}: {error}"
        found.append((answer, foreign[:]))
    return found

"""Functions in a process of their own with 10 seconds and 2 GB: what hangs, exhausts memory or aborts harms no test run."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from collections.abc import Callable
from typing import Any

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


def _run(connection: Any, function: Callable[..., Any], *arguments: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS)
    try:
        found = function(*arguments)
        connection.send(("returned", found))
    except BaseException as error:
        connection.send((type(error).__name__, str(error)))


def run_limited(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """Return `("returned", value)`, the name and the message of an error, or `"died"` and the exit code of the process."""
    here, there = _server.Pipe(duplex=False)
    process = _server.Process(target=_run, args=(there, function, *arguments))
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


def open_and_sample(folder: str) -> list[int]:
    """Open a folder and return the tokens of an image, which are the same for the same weights and tokenizer."""
    from vargen.pipelines.loading import open_pipeline

    pipe = open_pipeline(folder)
    return pipe("a red apple", temperature=0, output_type="latent").images[0].flatten().tolist()

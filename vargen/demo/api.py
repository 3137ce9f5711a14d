"""API endpoints: /generate and /methods. Their docstrings are the API documentation on the page.

/generate is a generator, because gradio can only end a generator: it closes one between two yields when the caller cancels the
job or disconnects. It therefore yields progress regularly.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, TypedDict

import gradio as gr
from gradio.data_classes import FileData

from vargen.decoding import PRESETS
from vargen.demo.image_service import ImageService
from vargen.demo.jobs import POLL_SECONDS, Job, JobResult, user_errors
from vargen.demo.request import PageRequest, new_seed
from vargen.pipelines.base import MethodInfo


class MethodReport(TypedDict):
    """A method, as /methods describes it; `reason` is why this model cannot run it."""

    name: str
    kind: str
    summary: str
    source: str
    reason: str | None
    experimental: bool


def add_api_endpoints(service: ImageService, queue_options: dict[str, Any]) -> None:
    """Register the endpoints with the page under construction."""

    def generate(
        prompt: str,
        method: str | None = None,
        seed: int | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        negative_prompt: str | None = None,
        num_images: int = 1,
        best_of: int = 1,
    ) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
        """Generate images from a prompt (for a class-conditional model: a class name or number).

        The method may have settings, as in gumbel:window=8. Omitted arguments take the model's defaults, and the seed a random
        value; top_k 0 keeps every token. Image k has seed + k. With best_of above 1, the scorer selects the best of that many
        candidates. Returns the PNG files, which carry their parameters, and the parameters with the statistics of the job. A
        streaming caller receives, during generation, no files and the number of tokens generated so far. A job stops early if
        it is canceled or its caller disconnects.
        """
        with user_errors():
            given: dict[str, Any] = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k}
            given |= {"top_p": top_p, "negative_prompt": negative_prompt}
            method = method or service.default_method
            request = _make_request(service, prompt, method, seed, given, num_images=num_images, best_of=best_of)
            result = yield from _stream_until_done(service.start(request, previews=False))
            yield [_file(path) for path in service.save(result)], _report(service, result)

    def methods() -> list[MethodReport]:
        """List the methods: name, "exact" or "relaxed", a summary, the paper, and the reason if this model cannot run it."""
        return [_describe_method(method) for method in service.methods.values()]

    files, report = list[FileData], dict[str, Any]
    _add_endpoint(generate, tuple[files, report], **queue_options)  # type: ignore[valid-type]
    _add_endpoint(methods, list[MethodReport], queue=False)


def _add_endpoint(function: Callable[..., Any], returns: Any, **options: Any) -> None:
    """Register a function under its name. Gradio documents the types of what it returns, but reads no Iterator of them."""
    function.__annotations__["return"] = returns
    gr.api(function, api_name=function.__name__, **options)


def _describe_method(method: MethodInfo) -> MethodReport:
    return {
        "name": method.name, "kind": method.kind, "summary": method.summary, "source": method.source,
        "reason": method.unsupported_reason, "experimental": PRESETS[method.name].experimental,
    }  # fmt: skip


def _make_request(
    service: ImageService, prompt: str, method: str, seed: int | None, given: dict[str, Any], **counts: int
) -> PageRequest:
    """Return a valid request. The model's defaults replace values of `given` that are None, and a random seed a missing one."""
    values = {**service.defaults, **{name: value for name, value in given.items() if value is not None}, **counts}
    request = PageRequest(prompt, method, new_seed() if seed is None else seed, **values)
    service.check(request)
    return request


def _stream_until_done(job: Job) -> Generator[tuple[list[Any], Any], None, JobResult]:
    """Yield the progress of a job, and return its result. Closing the generator stops the job."""
    try:
        while not job.done.wait(POLL_SECONDS):
            yield [], _progress(job)
        return job.result()
    finally:
        job.stop.set()


def _progress(job: Job) -> dict[str, Any]:
    return {"accelerator": job.request.method, "tokens_generated": job.tokens, "tokens": job.total}


def _file(path: str) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def _report(service: ImageService, result: JobResult) -> dict[str, Any]:
    parameters = service.parameters(result.request, result)
    rate = result.tokens_per_second
    return {**parameters, "tokens_per_second": rate, "images": result.records, "stats": result.stats.to_dict()}

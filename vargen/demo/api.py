"""API endpoints: /generate, /stream, /compare, /inpaint and /methods. Their docstrings are the API documentation on the page.

The endpoints that generate images are generators, because gradio can only end a generator: it closes one between two yields
when the caller cancels the job or disconnects. They therefore yield progress regularly.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypedDict

import gradio as gr
from gradio.data_classes import FileData

from vargen.decoding import PRESETS
from vargen.demo.image_service import ImageService
from vargen.demo.jobs import POLL_SECONDS, Job, JobResult, user_errors
from vargen.demo.race_tab import identical
from vargen.demo.request import MAX_RACERS, PageRequest, new_seed
from vargen.demo.sources import read_upload
from vargen.pipelines.base import MethodInfo


class MethodReport(TypedDict):
    """A method, as /methods describes it; `reason` is why this model cannot run it."""

    name: str
    kind: str
    summary: str
    source: str
    reason: str | None
    experimental: bool


class StreamReport(TypedDict):
    """The progress of a streamed job; `preview` is a WebP file in base64, empty until there is one."""

    accelerator: str
    tokens_generated: int
    tokens: int
    seconds: float
    preview: str


def add_api_endpoints(service: ImageService, queue_options: dict[str, Any]) -> None:
    """Register the endpoints with the page under construction; `add_inpaint_endpoint` adds one more."""

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

    def compare(
        prompt: str, methods: list[str], seed: int | None = None
    ) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
        """Generate one image with the same prompt and seed by several methods, one after another.

        Returns a PNG file and a report per method; `identical` is true if the image equals the baseline's. A streaming caller
        receives, during generation, no files and the number of tokens generated so far. A job stops early if it is canceled or
        its caller disconnects.
        """
        with user_errors():
            if not isinstance(methods, list) or not 2 <= len(methods) <= MAX_RACERS:
                raise ValueError(f"Give a list of two to {MAX_RACERS} methods.")
            seed = new_seed() if seed is None else seed
            requests = [_make_request(service, prompt, method, seed, {}) for method in methods]
            results = yield from _stream_in_turn(service, requests)
            baseline = next((each for each in results if each.request.method == service.baseline), None)
            same = [None if baseline is None else identical(each, baseline) for each in results]
            reports = [{**_report(service, each), "identical": one} for each, one in zip(results, same, strict=True)]
            yield [_file(path) for each in results for path in service.save(each)], reports

    def methods() -> list[MethodReport]:
        """List the methods: name, "exact" or "relaxed", a summary, the paper, and the reason if this model cannot run it."""
        return [_describe_method(method) for method in service.methods.values()]

    def stream(prompt: str, method: str | None = None, seed: int | None = None) -> Iterator[tuple[list[Any], StreamReport]]:
        """Generate one image and return it while it is generated: a preview and the progress about four times a second.

        The last value has the PNG file, too.
        """
        with user_errors():
            request = _make_request(service, prompt, method or service.default_method, seed, {})
            job = service.start(request)
            try:
                while not job.done.wait(POLL_SECONDS):
                    yield [], _stream_report(job)
                result = job.result()
                yield [_file(path) for path in service.save(result)], _stream_report(job)
            finally:
                job.stop.set()

    files, report = list[FileData], dict[str, Any]
    _add_endpoint(generate, tuple[files, report], **queue_options)  # type: ignore[valid-type]
    _add_endpoint(stream, tuple[files, StreamReport], **queue_options)  # type: ignore[valid-type]
    _add_endpoint(compare, tuple[files, list[report]], **queue_options)  # type: ignore[valid-type]
    _add_endpoint(methods, list[MethodReport], queue=False)


def add_inpaint_endpoint(service: ImageService, queue_options: dict[str, Any]) -> None:
    """Register /inpaint, if the model takes a source image."""
    side = service.pipe.image_size
    if side is None:
        return

    def inpaint(
        prompt: str,
        image: FileData,
        mask: FileData | None = None,
        strength: float | None = None,
        method: str | None = None,
        seed: int | None = None,
    ) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
        """Generate a part of an image again, or vary all of it, by the model of the Live mode.

        The mask has the size of the image and is white, or transparent, where the image is generated again; without a mask, it
        is varied as a whole. Strength is the fraction of the scales that are generated again: 0 keeps the image, 1 generates
        a new one; default 0.8, and 1 with a mask. Images of other sizes are cropped to a square and resized. Returns one PNG
        file and its parameters, as /generate does; the file records digests of image and mask, which it does not contain.
        """
        with user_errors():
            given = {"source": read_upload(image, mask, strength, side)}
            request = _make_request(service, prompt, method or service.default_method, seed, given)
            result = yield from _stream_until_done(service.start(request, previews=False))
            yield [_file(path) for path in service.save(result)], _report(service, result)

    _add_endpoint(inpaint, tuple[list[FileData], dict[str, Any]], **queue_options)


def _add_endpoint(function: Callable[..., Any], returns: Any, **options: Any) -> None:
    """Register a function under its name. Gradio documents the types of what it returns, but reads no Iterator of them."""
    function.__annotations__["return"] = returns
    gr.api(function, api_name=function.__name__, **options)


def _describe_method(method: MethodInfo) -> MethodReport:
    return {
        "name": method.name, "kind": method.kind, "summary": method.summary, "source": method.source,
        "reason": method.unsupported_reason, "experimental": PRESETS[method.name].experimental,
    }  # fmt: skip


def _stream_report(job: Job) -> StreamReport:
    preview = base64.b64encode(job.preview[0]).decode() if job.preview else ""
    return {
        "accelerator": job.request.method, "tokens_generated": job.tokens, "tokens": job.total,
        "seconds": round(job.seconds, 3), "preview": preview,
    }  # fmt: skip


def _make_request(
    service: ImageService, prompt: str, method: str, seed: int | None, given: dict[str, Any], **counts: int
) -> PageRequest:
    """Return a valid request. The model's defaults replace values of `given` that are None, and a random seed a missing one."""
    values = {**service.defaults, **{name: value for name, value in given.items() if value is not None}, **counts}
    request = PageRequest(prompt, method, new_seed() if seed is None else seed, **values)
    service.check(request)
    return request


def _stream_in_turn(
    service: ImageService, requests: list[PageRequest]
) -> Generator[tuple[list[Any], Any], None, list[JobResult]]:
    """Run one job per request. Yield the progress of all jobs so far, and return their results."""
    results: list[JobResult] = []
    progress: list[dict[str, Any]] = []
    for request in requests:
        job = service.start(request, previews=False, alone=True)
        results.append((yield from _stream_until_done(job, progress)))
        progress.append(_progress(job))
    return results


def _stream_until_done(
    job: Job, before: list[dict[str, Any]] | None = None
) -> Generator[tuple[list[Any], Any], None, JobResult]:
    """Yield the progress of a job after the results `before` it, and return its result. Closing the generator stops the job."""
    try:
        while not job.done.wait(POLL_SECONDS):
            yield [], _progress(job) if before is None else [*before, _progress(job)]
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

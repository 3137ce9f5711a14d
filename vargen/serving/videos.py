"""`/v1/videos`: jobs, their state, and their MP4, which plays while it is generated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationError

from vargen.mp4 import Mp4Writer, import_av
from vargen.serving.engine import Generator
from vargen.serving.errors import APIError, Body, refuse, to_api_error
from vargen.serving.model_card import ModelCard, RequestLimits
from vargen.serving.requests import Job, KeptFiles, StreamedBody, check_model, check_prompt, choose_seed
from vargen.serving.tasks import Begun, VideoFrames, VideoTask

_FORM = "multipart/form-data"
_MAX_JOBS = 256  # that are kept; finished ones are dropped first


class VideoBody(Body, strict=False):
    """Body of `POST /v1/videos`, as JSON or as a form, whose numbers are text. `num_blocks` and `seed` are additions."""

    prompt: str
    model: str | None = None
    size: str | None = None
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    num_blocks: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None


class VideoJob:
    """A video that is being generated, or was.

    Attributes:
        task: that was requested.
        chunks: of its MP4 so far.
        status: `"queued"`, `"in_progress"`, `"completed"` or `"failed"`.
        error: why it failed; None if it did not.
        is_done: whether nothing more happens.
    """

    def __init__(self, generator: Generator, task: VideoTask, card: ModelCard, limits: RequestLimits):
        self.task, self.card, self.name = task, card, ""
        self.total = task.num_frames or count_frames(task.num_blocks, card)
        self.chunks: list[bytes] = []
        self.status, self.frames, self.is_done = "queued", 0, False
        self.error: dict[str, Any] | None = None
        self.created = int(time.time())
        self.completed: int | None = None
        self._job = Job(generator, [task], limits.seconds)
        self._changed = asyncio.Condition()
        self._running = asyncio.create_task(self._generate())

    @property
    def document(self) -> dict[str, Any]:
        """The job as OpenAI's clients read it."""
        return {
            "id": self.name,
            "object": "video",
            "status": self.status,
            "progress": 100 * self.frames // self.total,
            "model": self.card.name,
            "prompt": self.task.subject,
            "seconds": f"{self.total / self.card.fps:g}",
            "size": self.card.size_name,
            "seed": self.task.seed,
            "created_at": self.created,
            "completed_at": self.completed,
            "error": self.error and {name: self.error[name] for name in ("code", "message")},
        }

    def cancel(self) -> None:
        """End the generation within one pass."""
        self._running.cancel()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of the MP4, also those that are not generated yet; it ends early if the job fails."""
        sent = 0
        while True:
            async with self._changed:
                while sent == len(self.chunks) and not self.is_done:
                    await self._changed.wait()
            if sent == len(self.chunks):
                return
            yield self.chunks[sent]
            sent += 1

    async def _generate(self) -> None:
        file = _Chunks()
        try:
            writer = Mp4Writer(file, self.card.size, self.card.fps, live=True)
            async for _, event in self._job:
                if isinstance(event, Begun):
                    self.status = "in_progress"
                if isinstance(event, VideoFrames):
                    await asyncio.to_thread(_add_frames, writer, event)
                    self.frames += len(event.frames)
                    await self._add(file.take())
            writer.close()
            self.status, self.completed = "completed", int(time.time())
        except Exception as error:
            self.status, self.error = "failed", to_api_error(error).body["error"]
        finally:
            self._job.cancel()
            self.is_done = True
            await self._add(file.take())

    async def _add(self, chunk: bytes) -> None:
        """Add a chunk, unless it is empty, and wake up who waits for it."""
        async with self._changed:
            self.chunks += [chunk] if chunk else []
            self._changed.notify_all()


def add_video_routes(app: FastAPI, card: ModelCard, generator: Generator, limits: RequestLimits) -> tuple[str, ...]:
    """Add the endpoints; returns the path of the first one."""
    import_av()  # without it, the service does not start
    jobs = KeptFiles[VideoJob](lambda job: sum(map(len, job.chunks)) if job.is_done else 0, limits.kept_bytes)

    def find(name: str) -> VideoJob:
        if (job := jobs.get(name)) is None:
            raise APIError(404, "There is no such video, or no longer.", param="video_id", code="not_found")
        return job

    @app.post("/v1/videos")
    async def create(request: Request) -> JSONResponse:
        job = VideoJob(generator, make_task(await _read_body(request), card, limits), card, limits)
        job.name = jobs.keep(job)
        for name, each in list(jobs.items())[: max(0, len(jobs) - _MAX_JOBS)]:
            if each.is_done:
                del jobs[name]
        return JSONResponse(job.document)

    @app.api_route("/v1/videos/{name}", methods=["GET", "HEAD"])
    async def show(name: str) -> dict[str, Any]:
        return find(name).document

    @app.delete("/v1/videos/{name}")
    async def delete(name: str) -> dict[str, Any]:
        find(name).cancel()
        del jobs[name]
        return {"id": name, "object": "video.deleted", "deleted": True}

    @app.get("/v1/videos/{name}/content")
    async def content(name: str, variant: str = "video") -> Response:
        job = find(name)
        if variant != "video":
            raise refuse("variant", f"must be 'video', got {variant[:80]!r}")
        if job.error is not None:
            raise APIError(409, f"The video failed: {job.error['message']}", code=job.error["code"])
        return StreamedBody(job.stream(), "video/mp4", limits.seconds)

    return ("/v1/videos",)


async def _read_body(request: Request) -> VideoBody:
    """Return the body, JSON or a form of text fields."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_form = kind == _FORM
    if not is_form and kind != "application/json":
        raise APIError(415, f"Content-Type must be application/json or {_FORM}.", code="unsupported_media_type")
    try:
        fields = dict(await request.form(max_files=0, max_fields=32)) if is_form else await request.json()
    except (ValueError, RecursionError):
        raise APIError(400, "The body must be JSON in UTF-8, or a form of text fields.", code="invalid_json") from None
    try:
        return VideoBody.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def make_task(body: VideoBody, card: ModelCard, limits: RequestLimits) -> VideoTask:
    """Return the task of a request.

    Raises:
        APIError: for an invalid field, with its name, its value and what is allowed.
    """
    check_model(body.model, body.size, card)
    prompt, seed = check_prompt(body.prompt, limits), choose_seed(body.seed)
    if body.seconds is None:
        blocks = body.num_blocks or min(card.num_blocks, limits.blocks)
        if blocks > limits.blocks:
            raise refuse("num_blocks", f"must be at most {limits.blocks}, got {blocks}")
        return VideoTask(prompt, seed, blocks)
    longest = count_frames(limits.blocks, card)
    frames = max(1, round(body.seconds * card.fps)) if body.seconds * card.fps < longest + 1 else longest + 1
    if frames > longest:
        raise refuse("seconds", f"must be over 0 and at most {longest / card.fps:g}, got {body.seconds:g}")
    blocks = next(count for count in range(1, limits.blocks + 1) if count_frames(count, card) >= frames)
    return VideoTask(prompt, seed, blocks, frames)


def count_frames(blocks: int, card: ModelCard) -> int:
    """Return the number of frames of a video of some blocks."""
    first, others = card.block_frames
    return first + (blocks - 1) * others


def _add_frames(writer: Mp4Writer, frames: VideoFrames) -> None:
    for frame in frames.frames:
        writer.add(frame)


class _Chunks:
    """A file that keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, content: bytes) -> int:
        self._parts.append(bytes(content))
        return len(content)

    def take(self) -> bytes:
        """Return what was written since the last call."""
        content, self._parts = b"".join(self._parts), []
        return content

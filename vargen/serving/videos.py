"""`/v1/videos`: jobs, their state, and their MP4, which plays while it is generated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationError

from vargen.mp4 import Mp4Writer, import_av
from vargen.serving.api import KEPT_BYTES, Body, Job, ModelCard, RequestLimits, StreamedBody, keep
from vargen.serving.engine import GenerationThread
from vargen.serving.errors import APIError, refuse, to_api_error
from vargen.serving.tasks import Begun, VideoTask

_MAX_JOBS = 256  # finished ones that are kept


class VideoBody(Body, strict=False):
    """Body of `POST /v1/videos`, as JSON or as a form, whose numbers are text."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    num_blocks: Annotated[int, Field(ge=1)] | None = None


class VideoJob:
    """A video that is being generated, or was.

    Attributes:
        document: the job as OpenAI's clients read it.
        chunks: of its MP4 so far.
        is_done: whether nothing more happens.
    """

    def __init__(self, generation: GenerationThread, task: VideoTask, card: ModelCard, seconds: float):
        self.total = task.num_frames or count_frames(task.num_blocks, card)
        self.chunks, self.is_done, self._frames = list[bytes](), False, 0
        self.document: dict[str, Any] = {
            "object": "video",
            "status": "queued",
            "progress": 0,
            "model": card.name,
            "prompt": task.subject,
            "seconds": f"{self.total / card.fps:g}",
            "size": card.size_name,
            "seed": task.seed,
            "created_at": int(time.time()),
            "completed_at": None,
            "error": None,
        }
        self._job, self._changed = Job(generation, [task], seconds), asyncio.Event()
        self.running = asyncio.create_task(self._generate(card))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of the MP4 as they come; it ends early if the job fails."""
        sent = 0
        while sent < len(self.chunks) or not self.is_done:
            if sent == len(self.chunks):
                await self._changed.wait()
            for chunk in self.chunks[sent:]:
                yield chunk
                sent += 1

    async def _generate(self, card: ModelCard) -> None:
        parts: list[bytes] = []
        file = SimpleNamespace(write=lambda part: parts.append(bytes(part)))
        try:
            writer = Mp4Writer(file, card.size, card.fps, live=True)
            async for _, event in self._job:
                if isinstance(event, Begun):
                    self.document["status"] = "in_progress"
                if isinstance(event, np.ndarray):
                    for frame in event:
                        await asyncio.to_thread(writer.add, frame)
                    self._frames += len(event)
                    self.document["progress"] = 100 * self._frames // self.total
                    self._add(parts)
            writer.close()
            self.document |= {"status": "completed", "completed_at": int(time.time())}
        except Exception as error:
            found = to_api_error(error)
            self.document |= {"status": "failed", "error": {"code": found.code, "message": found.detail}}
        finally:
            self._job.cancel()
            self.is_done = True
            self._add(parts)

    def _add(self, parts: list[bytes]) -> None:
        """Move what was written to the chunks, and wake up who waits for it."""
        self.chunks += [b"".join(parts)] if parts else []
        parts.clear()
        self._changed.set()
        self._changed = asyncio.Event()


def add_video_routes(app: FastAPI, card: ModelCard, generation: GenerationThread, limits: RequestLimits) -> tuple[str, ...]:
    """Add the endpoints; returns the path of the first one."""
    import_av()  # without it, the service does not start
    jobs: dict[str, VideoJob] = {}

    def size_of(job: VideoJob) -> int:
        return max(sum(map(len, job.chunks)), KEPT_BYTES // _MAX_JOBS) if job.is_done else 0

    def find(name: str) -> VideoJob:
        if (job := jobs.get(name)) is None:
            raise APIError(404, "There is no such video, or no longer.", "not_found", "video_id")
        return job

    @app.post("/v1/videos")
    async def create(request: Request) -> JSONResponse:
        job = VideoJob(generation, make_task(await _read_body(request), card, limits), card, limits.seconds)
        job.document["id"] = keep(jobs, job, size_of)
        return JSONResponse(job.document)

    @app.api_route("/v1/videos/{name}", methods=["GET", "HEAD"])
    async def show(name: str) -> dict[str, Any]:
        return find(name).document

    @app.delete("/v1/videos/{name}")
    async def delete(name: str) -> dict[str, Any]:
        find(name).running.cancel()
        del jobs[name]
        return {"id": name, "object": "video.deleted", "deleted": True}

    @app.get("/v1/videos/{name}/content")
    async def content(name: str, variant: Literal["video"] = "video") -> Response:
        job = find(name)
        if (error := job.document["error"]) is not None:
            raise APIError(409, f"The video failed: {error['message']}", error["code"])
        return StreamedBody(job.stream(), "video/mp4", limits.seconds)

    return ("/v1/videos",)


async def _read_body(request: Request) -> VideoBody:
    """Return the body, JSON or a form of text fields."""
    is_form = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
    try:
        fields = dict(await request.form(max_files=0, max_fields=32)) if is_form else await request.json()
        return VideoBody.model_validate(fields)
    except ValidationError:
        raise
    except (ValueError, RecursionError):
        raise APIError(400, "The body must be JSON in UTF-8, or a form of text fields.", "invalid_json") from None


def make_task(body: VideoBody, card: ModelCard, limits: RequestLimits) -> VideoTask:
    """Return the task of a request."""
    seed, longest = body.check(card), count_frames(limits.blocks, card)
    if body.seconds is None:
        blocks = body.num_blocks or min(card.num_blocks, limits.blocks)
        if blocks > limits.blocks:
            raise refuse("num_blocks", f"must be at most {limits.blocks}, got {blocks}")
        return VideoTask(body.prompt, seed, blocks)
    if body.seconds * card.fps >= longest + 0.5:
        raise refuse("seconds", f"must be over 0 and at most {longest / card.fps:g}, got {body.seconds:g}")
    frames = max(1, round(body.seconds * card.fps))
    blocks = next(count for count in range(1, limits.blocks + 1) if count_frames(count, card) >= frames)
    return VideoTask(body.prompt, seed, blocks, frames)


def count_frames(blocks: int, card: ModelCard) -> int:
    """Return the number of frames of a video of some blocks."""
    first, others = card.block_frames
    return first + (blocks - 1) * others

"""Videos by OpenAI's client: an MP4 that plays while it is generated."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from served import Gate, serving

from vargen import open_pipeline
from vargen.mp4 import import_av
from vargen.serving.api import RequestLimits, build_app
from vargen.serving.engine import GenerationThread
from vargen.serving.server import warm_up


@pytest.fixture(scope="module")
def pipe(video_model: Path) -> Any:
    return open_pipeline(video_model)


@pytest.fixture(scope="module")
def generation(pipe: Any) -> Iterator[GenerationThread]:
    with GenerationThread(pipe, "target", slots=2, max_waiting=1) as made:
        yield made


@pytest.fixture(scope="module")
def address(pipe: Any, generation: GenerationThread) -> Iterator[str]:
    card = warm_up(pipe, generation, "tiny-video")
    with serving(build_app(card, generation, RequestLimits(blocks=8, seconds=30))) as made:
        yield made


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=30)


@pytest.fixture(autouse=True)
def deprecated_in_the_client() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def read_frames(content: bytes) -> list[np.ndarray]:
    with import_av().open(io.BytesIO(content)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def finish(client: Any, **fields: Any) -> tuple[Any, bytes]:
    """The finished job of a video, and its content."""
    made = client.videos.create(prompt="a cat", extra_body=fields)
    video = client.videos.poll(made.id, poll_interval_ms=20)
    return video, client.videos.download_content(video.id).read() if video.status == "completed" else b""


def test_a_video_is_a_job_whose_content_plays_while_it_is_generated(client: Any, pipe: Any) -> None:
    gate = Gate(pipe.transformer)
    made = client.videos.create(prompt="a cat", extra_body={"seed": "3", "num_blocks": "3"})
    assert made.status in ("queued", "in_progress") and made.prompt == "a cat" and made.size == "16x16" and made.seed == 3
    with client.videos.with_streaming_response.download_content(made.id) as answer:
        assert answer.headers["content-type"] == "video/mp4"
        parts, first = answer.iter_bytes(), b""
        while not first:
            first = next(parts)
        gate.close()  # what has been sent by now can be played
        shown = read_frames(first)
        gate.open()
        content = first + b"".join(parts)
    gate.remove()
    video, again = client.videos.poll(made.id, poll_interval_ms=20), client.videos.download_content(made.id).read()
    assert video.status == "completed" and video.progress == 100 and video.completed_at and again == content
    frames = read_frames(content)
    whole = pipe("a cat", num_blocks=3, accelerator="target", generator=torch.Generator().manual_seed(3)).frames[0]
    assert len(shown) > 0 and len(frames) == len(whole) and frames[0].shape[:2] == (16, 16)
    error = np.mean([abs(np.asarray(image).astype(int) - frame).mean() for image, frame in zip(whole, frames, strict=True)])
    assert error < 20  # of 255; the codec loses some
    assert client.videos.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(made.id)


@pytest.mark.parametrize("seconds", [0.1, 1])
def test_a_video_has_as_many_seconds_as_were_asked_for(client: Any, pipe: Any, seconds: float) -> None:
    video, content = finish(client, seconds=str(seconds))
    assert len(read_frames(content)) == round(seconds * pipe.fps) and float(video.seconds) == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds": "999"},
        {"seconds": "long"},
        {"num_blocks": 0},
        {"num_blocks": 99},
        {"size": "9x9"},
        {"prompt": " "},
        {"n": 2},
    ],
)
def test_invalid_fields_are_refused_by_name(client: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as failed:
        client.post("/videos", body={"prompt": "a cat", **fields}, cast_to=object)
    assert failed.value.param == next(iter(fields))


def test_a_deleted_video_ends_and_others_go_on(client: Any, pipe: Any, generation: GenerationThread) -> None:
    gate = Gate(pipe.transformer)
    gate.close()
    made = client.videos.create(prompt="a cat", extra_body={"num_blocks": 8})
    gate.wait_for_pass()
    client.videos.delete(made.id)
    gate.open()
    _, content = finish(client, num_blocks=8)
    assert len(read_frames(content)) == pipe.transformer.geometry.pixel_frames(0, 16)
    passes = gate.passes
    gate.remove()
    assert generation.stats.num_active == 0 and generation.stats.num_waiting == 0
    gate = Gate(pipe.transformer)
    pipe("a dog", num_blocks=8, accelerator="target")
    assert passes < 2 * gate.passes  # those of the deleted video are missing
    gate.remove()


def test_a_video_that_fails_says_so(client: Any, pipe: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("cannot read /home/me/secret.txt")

    broken = pipe.transformer.register_forward_pre_hook(fail)
    video, _ = finish(client)
    broken.remove()
    assert video.status == "failed" and video.error.code == "generation_failed" and "secret" not in video.error.message
    with pytest.raises(openai.ConflictError):
        client.videos.download_content(video.id)


def test_images_are_not_served_by_a_video_model(client: Any, address: str) -> None:
    with pytest.raises(openai.NotFoundError) as failed:
        client.images.generate(prompt="a cat")
    assert failed.value.code == "not_found" and "generate images; 'emoji' can" in str(failed.value)

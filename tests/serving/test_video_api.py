"""Videos by OpenAI's client: an MP4 that plays while it is generated."""

from __future__ import annotations

import io
import json
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
from vargen.serving.app import build_app
from vargen.serving.generation import GenerationThread
from vargen.serving.launch import warm_up
from vargen.serving.limits import RequestLimits


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


def test_a_video_is_streamed_block_by_block(client: Any, pipe: Any) -> None:
    gate = Gate(pipe.transformer)
    with client.videos.with_streaming_response.create(prompt="a cat", extra_body={"seed": "3", "num_blocks": "3"}) as answer:
        assert answer.headers["content-type"] == "video/mp4" and answer.headers["x-seed"] == "3"
        parts, first = answer.iter_bytes(), b""
        gate.close()  # what has been sent by now can be played
        while not first:
            first = next(parts)
        shown = read_frames(first)
        gate.open()
        content = first + b"".join(parts)
    gate.remove()
    frames = read_frames(content)
    whole = pipe("a cat", num_blocks=3, accelerator="target", generator=torch.Generator().manual_seed(3)).frames[0]
    assert len(shown) > 0 and len(frames) == len(whole) and frames[0].shape[:2] == (16, 16)
    error = np.mean([abs(np.asarray(image).astype(int) - frame).mean() for image, frame in zip(whole, frames, strict=True)])
    assert error < 20  # of 255; the codec loses some


def test_seconds_are_rounded_up_to_blocks(client: Any, pipe: Any) -> None:
    geometry = pipe.transformer.geometry
    with client.videos.with_streaming_response.create(prompt="a cat", seconds="0.1") as answer:
        content = answer.read()
    assert len(read_frames(content)) == geometry.pixel_frames(0, geometry.block_frames)


@pytest.mark.parametrize(
    "fields", [{"seconds": "999"}, {"seconds": "long"}, {"num_blocks": 0}, {"size": "9x9"}, {"prompt": " "}]
)
def test_invalid_fields_are_refused_by_name(client: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as failed:
        client.post("/videos", body={"prompt": "a cat", **fields}, cast_to=object)
    assert failed.value.param == next(iter(fields))


def test_a_client_that_goes_away_ends_its_video_and_others_go_on(client: Any, pipe: Any, generation: GenerationThread) -> None:
    gate = Gate(pipe.transformer)
    with client.videos.with_streaming_response.create(prompt="a cat", extra_body={"num_blocks": 8}) as answer:
        next(answer.iter_bytes())
    with client.videos.with_streaming_response.create(prompt="a dog", extra_body={"num_blocks": 8}) as answer:
        assert len(read_frames(answer.read())) == pipe.transformer.geometry.pixel_frames(0, 16)
    passes = gate.passes
    gate.remove()
    assert generation.stats.num_active == 0 and generation.stats.num_waiting == 0
    gate = Gate(pipe.transformer)
    pipe("a dog", num_blocks=8, accelerator="target")
    assert passes < 2 * gate.passes  # those of the video whose client had gone are missing
    gate.remove()


def test_images_are_not_served_by_a_video_model(client: Any, address: str) -> None:
    with pytest.raises(openai.NotFoundError) as failed:
        client.images.generate(prompt="a cat")
    assert json.loads(failed.value.response.text)["error"]["code"] == "not_found"

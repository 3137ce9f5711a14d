"""The code of docs/serving.md runs as it stands, against services of tiny models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown import blocks
from PIL import Image
from served import serving
from tiny_models import infinity_pipeline, text_pipeline, text_var_pipeline

import vargen
from vargen.serving.api import RequestLimits, build_app
from vargen.serving.engine import GenerationThread
from vargen.serving.server import warm_up

ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def code(repo_root: Path) -> list[str]:
    """The Python blocks: an image, its stream, an edit, a video, and the service's thread in Python."""
    found = [block.code for block in blocks(repo_root / "docs/serving.md", "python")]
    assert len(found) == 5
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # in OpenAI's client
        yield tmp_path


def run(pipe: Any, method: str, *parts: str) -> dict[str, Any]:
    """Run code against a service of a pipeline; the first part of the page makes the client."""
    scope: dict[str, Any] = {}
    with GenerationThread(pipe, method, slots=2) as generation:
        app = build_app(warm_up(pipe, generation, "tiny"), generation, RequestLimits(seconds=60))
        with serving(app) as address:
            for part in parts:
                exec(compile(part.replace(ADDRESS, address), "serving.md", "exec"), scope)
            scope["client"].close()
    return scope


def test_images_are_generated_and_streamed(code: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(text_pipeline(grid_size=6), "gumbel", *code[:2])
    assert Image.open("apple.png").format == "PNG"
    assert capsys.readouterr().out.split("\n")[-2] == "image_generation.completed"


@pytest.mark.parametrize("make", [text_var_pipeline, infinity_pipeline])
def test_an_image_is_edited(code: list[str], place: Path, make: Any) -> None:
    pipe = make()
    size = pipe("a red apple").images[0].size
    Image.new("RGBA", size, (200, 0, 0, 255)).save("apple.png")
    Image.new("RGBA", size, (0, 0, 0, 0)).save("mask.png")
    client = code[0].split("image = ")[0]
    assert run(pipe, "plain", client, code[2])["edited"].data[0].b64_json


def test_a_video_is_downloaded(code: list[str], place: Path, video_model: Path) -> None:
    client = code[0].split("image = ")[0]
    run(vargen.open_pipeline(video_model), "target", client, code[3])
    assert b"ftyp" in (place / "hand.mp4").read_bytes()[:64]


def test_the_thread_generates_without_a_service(code: list[str], place: Path) -> None:
    text_pipeline(grid_size=6).save_pretrained(place / "tiny")
    exec(compile(code[4].replace('"emoji"', repr(str(place / "tiny"))), "serving.md", "exec"), {})
    assert len(list(place.glob("apple-*.png"))) == 8

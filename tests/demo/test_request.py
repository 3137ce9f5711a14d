"""Limits, and the round trip of settings through a PNG."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rejects import rejects

pytest.importorskip("gradio")

from vargen.demo.request import MAX_SEED, ImageFolder, PageRequest, request_from_metadata
from vargen.image_metadata import read_parameters


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": ""}, "Type a prompt"),
        ({"prompt": None}, "Type a prompt"),
        ({"prompt": 3}, "must be text"),
        ({"prompt": "x" * 301}, "at most 300"),
        ({"prompt": "\udc80"}, "not text"),
        ({"prompt": "a", "method": ""}, "Choose a method"),
        ({"prompt": "a", "seed": None}, "please fill it in"),
        ({"prompt": "a", "seed": MAX_SEED + 1}, "seed"),
        ({"prompt": "a", "guidance_scale": float("nan")}, "Guidance"),
        ({"prompt": "a", "temperature": True}, "Temperature"),
        ({"prompt": "a", "top_p": 0}, "Top-p"),
        ({"prompt": "a", "num_images": 5}, "number of images"),
    ],
)
def test_limits_are_reported_in_words(given: dict, message: str) -> None:
    rejects(lambda: PageRequest(**given), message)


def test_parameters_go_through_a_png(tmp_path: Path) -> None:
    folder = ImageFolder(max_files=2)
    wanted = PageRequest("a red apple", "gumbel", 5, 2.5, 0.7, 50, 0.9, "blurry", 1)
    image = Image.new("RGB", (8, 8))
    paths = [folder.save(image, wanted.parameters()) for _ in range(3)]
    assert not paths[0].exists(), "old pictures go"
    assert request_from_metadata(read_parameters(paths[2]), {}) == wanted
    assert "apple" not in str(paths[2]), "a prompt is nobody's file name"
    folder.close()
    assert not paths[2].exists()


def test_images_of_the_command_line_are_read(tmp_path: Path) -> None:
    from vargen.cli.outputs import OutputFile
    from vargen.cli.results import save_image

    told = {
        "prompt": "a cat",
        "seed": 3,
        "accelerator": "ar",
        "guidance_scale": 4.0,
        "temperature": 1.0,
        "top_k": None,
        "top_p": 1,
    }
    path = save_image(Image.new("RGB", (8, 8)), OutputFile(tmp_path / "a.png", True), told)
    found = request_from_metadata(read_parameters(path), {"top_k": 500})
    assert (found.prompt, found.seed, found.top_k) == ("a cat", 3, 0)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"seed": 1}', "[" * 20_000, '{"prompt": "' + "x" * 30_000 + '"}'])
def test_damaged_parameters_get_a_message(tmp_path: Path, text: str) -> None:
    chunk = PngInfo()
    chunk.add_text("vargen", text)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=chunk)
    rejects(lambda: read_parameters(tmp_path / "a.png"), "damaged")


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + b"\xff" * 40]
)
def test_other_files_get_a_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(ValueError, match="readable PNG"):
        read_parameters(tmp_path / "a.png")


def test_a_compressed_bomb_is_refused(tmp_path: Path) -> None:
    chunk = PngInfo()
    chunk.add_text("vargen", json.dumps({"prompt": "x" * 5_000_000}), zip=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=chunk)
    with pytest.raises(ValueError, match=r"readable PNG|damaged"):
        read_parameters(tmp_path / "a.png")


@pytest.mark.parametrize("told", [{"prompt": "a", "seed": "x"}, {"prompt": "a", "guidance_scale": 99}, {"prompt": ""}])
def test_parameters_out_of_range_get_a_message(told: dict) -> None:
    with pytest.raises(ValueError):
        request_from_metadata(told, {})

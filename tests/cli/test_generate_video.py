"""`vargen generate` with a model of video, and the other family's options refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from PIL import Image
from tiny_models import text_pipeline
from typer.testing import CliRunner

from vargen.cli.main import app


def run(*words: object):
    return CliRunner().invoke(app, ["generate", *map(str, words), "--threads", "1"])


def test_a_prompt_becomes_a_looping_file(video_model: Path, tmp_path: Path) -> None:
    found = run("a cat", "--model", video_model, "-o", tmp_path / "cat.webp", "--seed", "5", "--num-blocks", "2", "--json")
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    (video,) = said["videos"]
    assert said["fps"] == 12 and video["seed"] == 5 and len(video["stats"]["blocks"]) == 2
    with Image.open(tmp_path / "cat.webp") as image:
        assert image.n_frames == 4


def test_an_image_model_generates_what_it_starts_from(video_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    text_pipeline().save_pretrained(folder)
    words = ("a cat", "--model", video_model, "--seed", "5", "--num-blocks", "1", "--accelerator", "target", "-q")
    alone, started = tmp_path / "alone.webp", tmp_path / "started.webp"
    assert run(*words, "-o", str(alone)).exit_code == 0
    found = run(*words, "-o", str(started), "--image-model", str(folder))
    assert found.exit_code == 0, found.output
    with Image.open(alone) as one, Image.open(started) as other:
        assert other.n_frames == one.n_frames + 1, "the image is the first frame"
    settings = json.loads((video_model / "model_index.json").read_text())
    folder = Path(shutil.copytree(video_model, tmp_path / "video"))
    settings["defaults"]["image_model"] = "emoji"
    (folder / "model_index.json").write_text(json.dumps(settings))
    words = ("a cat", "--model", str(folder), *words[3:])
    for name, frames in (("default", 3), ("none", 2)):
        file = tmp_path / f"{name}.webp"
        found = run(*words, "-o", str(file), *(() if name == "default" else ("--image-model", name)))
        assert found.exit_code == 0, found.output
        with Image.open(file) as image:
            assert image.n_frames == frames, name

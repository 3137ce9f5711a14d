"""`vargen train drafter`: options reach the trainers, results are JSON, mistakes are named before anything runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """24 captioned 8 x 8 images of anyone's."""
    folder = tmp_path / "data"
    folder.mkdir()
    np.save(folder / "images.npy", np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8))
    lines = [{"caption": f"thing {i}", "split": "validation" if i % 6 == 0 else "train"} for i in range(24)]
    (folder / "captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


UPSAMPLER = "low_grid = 2\nbatch_size = 2\n[schedule]\nsteps = 500\nwarmup_steps = 1\n[model]\ndim = 32\nblocks = 1\n"
LOW_RES = """
batch_size = 2
[schedule]
steps = 500
warmup_steps = 1
[model]
dim = 32
n_layer = 1
n_head = 2
vocab_size = 64
grid_size = 2
caption_dim = 32
cls_token_num = 16
multiple_of = 32
"""
HEAD = (
    "num_images = 500\nvalidation_images = 4\ngeneration_batch_size = 4\n"
    "batch_size = 2\n[schedule]\nsteps = 500\nwarmup_steps = 1\n"
)


def test_a_low_resolution_model_is_trained_on_images_of_anyones(run: Any, images: Path, text_model: Any) -> None:
    Path("tiny.toml").write_text(LOW_RES)
    words = ("--model", text_model, "--data", images, "--recipe", "tiny.toml", "--output", "run", "--steps", 2)
    result = run("train", "drafter", "low-res", *words)
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)
    assert metrics["model"] == "run/transformer" and metrics["validation_loss"] > 0
    assert Path("run/transformer/config.json").is_file()


def test_an_upsampler_is_trained_on_images_of_anyones(run: Any, images: Path, text_model: Any) -> None:
    Path("tiny.toml").write_text(UPSAMPLER)
    words = ("--model", text_model, "--data", images, "--recipe", "tiny.toml", "--steps", 2)
    result = run("train", "drafter", "upsampler", *words)
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)
    assert metrics["model"] == "runs/upsampler/upsampler" and metrics["row_loss"] > 0


@pytest.mark.parametrize("source", ["--prompt-file", "--data"])
def test_heads_are_trained_on_images_of_prompts(run: Any, images: Path, text_model: Any, source: str) -> None:
    Path("tiny.toml").write_text(HEAD)
    Path("prompts.txt").write_text("a cat\na dog\na fox\n")
    prompts = "prompts.txt" if source == "--prompt-file" else images
    words = ("--model", text_model, source, prompts, "--recipe", "tiny.toml", "--num-images", 12, "--steps", 2)
    result = run("train", "drafter", "medusa", *words, "--generated-images", "shared")
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)
    assert metrics["drafter"] == "runs/medusa/drafter" and 0 <= metrics["acceptance_1"] <= 1
    assert len(list(Path("shared").glob("*.npz"))) > 1

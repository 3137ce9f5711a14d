"""Arguments of other diffusers pipelines: taken where they mean the same, else answered with what to write."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import class_pipeline, text_pipeline
from tiny_video_folder import video_folder

from vargen.pipelines.registry import open_pipeline

BLANKS = ["", "  ", None, [""], ["", ""]]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture(scope="module", params=["next-token", "next-scale", "video"])
def drawer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pipeline of each family that draws text."""
    if request.param == "video":
        pipe = open_pipeline(video_folder(tmp_path_factory.mktemp("runs")))
    else:
        pipe = text_pipeline() if request.param == "next-token" else open_pipeline("emoji-var")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generated(pipe: Any, **options: Any) -> np.ndarray:
    options = {"num_blocks": 1, "accelerator": "target", **options} if hasattr(pipe, "stream") else options
    result = pipe("a red apple", generator=seeded(), output_type="np", **options)
    return np.asarray(result.frames if hasattr(pipe, "stream") else result.images)


def test_an_empty_negative_prompt_is_none(drawer: Any) -> None:
    plain = generated(drawer)
    for blank in BLANKS:
        assert np.array_equal(generated(drawer, negative_prompt=blank), plain)


def test_an_empty_negative_prompt_is_none_for_classes() -> None:
    pipe = class_pipeline()
    pipe.set_progress_bar_config(disable=True)
    plain, blank = ({"class_labels": 1, "output_type": "latent", **given} for given in ({}, {"negative_prompt": ""}))
    assert torch.equal(pipe(**plain, generator=seeded()).images, pipe(**blank, generator=seeded()).images)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("seed", 7, "generator=torch.Generator().manual_seed(7)"), ("height", 256, "resize"), ("width", 256, "resize"),
        ("num_inference_steps", 20, "accelerator="), ("acelerator", "ar", "accelerator"), ("zzzz", 1, "prompt"),
    ],
)  # fmt: skip
def test_other_arguments_are_answered_with_what_to_write(drawer: Any, name: str, value: Any, remedy: str) -> None:
    with pytest.raises(TypeError) as caught:
        drawer("a red apple", **{name: value})
    said = str(caught.value)
    assert name in said and str(value) in said and remedy in said and "\n" not in said


def test_a_video_says_that_it_takes_no_negative_prompt(tmp_path: Path) -> None:
    pipe = open_pipeline(video_folder(tmp_path))
    for call in (pipe, pipe.stream):
        with pytest.raises(TypeError, match="negative_prompt"):
            call("a red apple", negative_prompt="blue")


def test_the_arguments_are_still_to_be_seen(drawer: Any) -> None:
    """By `help`, editors and diffusers itself, which asks what a call takes."""
    assert "generator" in inspect.signature(type(drawer).__call__).parameters
    assert type(drawer).__call__.__doc__


def test_opening_a_model_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No bar for a second's work; in a process of its own: test_loading_memory.py."""
    text_pipeline().save_pretrained(tmp_path / "model")
    assert capfd.readouterr() is not None and open_pipeline(tmp_path / "model").transformer is not None
    assert capfd.readouterr() == ("", "")

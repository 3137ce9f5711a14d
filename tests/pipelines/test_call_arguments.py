"""Arguments of other diffusers pipelines: an empty negative prompt is none, and unknown names are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rejects import rejects
from tiny_families import TINY
from tiny_models import text_pipeline

from vargen.pipelines.registry import open_pipeline


@pytest.mark.parametrize("family", [name for name in TINY if name != "video"])
def test_an_empty_negative_prompt_is_none(family: str, tmp_path: Path) -> None:
    pipe = TINY[family].open(tmp_path)
    plain = TINY[family].call(pipe, output_type="latent").images
    for blank in ("", "  ", None, [""], ["", ""]):
        assert torch.equal(TINY[family].call(pipe, output_type="latent", negative_prompt=blank).images, plain)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("name", ["seed", "height", "acelerator"])
def test_unknown_arguments_are_named(family: str, name: str, tmp_path: Path) -> None:
    tiny: Any = TINY[family]
    rejects(lambda: tiny.call(tiny.open(tmp_path), **{name: 7}), name, TypeError)


def test_opening_a_model_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No bar for a second's work; in a process of its own: test_loading_memory.py."""
    text_pipeline().save_pretrained(tmp_path / "model")
    assert capfd.readouterr() is not None and open_pipeline(tmp_path / "model").transformer is not None
    assert capfd.readouterr() == ("", "")

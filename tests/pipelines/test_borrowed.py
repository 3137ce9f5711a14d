"""Models that take their text encoder from a packaged one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rejects import rejects
from tiny_models import text_var_pipeline, tiny_var

from vargen.pipelines.loading import SHARED_FILE as FILE
from vargen.pipelines.registry import inspect_model, open_pipeline

ALL = {"text_encoder": "emoji", "tokenizer": "emoji", "prompt_names": "emoji"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pipe = text_var_pipeline(draft=False)
    pipe.register_modules(transformer=tiny_var("text", caption_dim=384))  # as wide as the encoder of emoji
    pipe.save_pretrained(tmp_path / "model")
    for part in ("text_encoder", "tokenizer"):
        shutil.rmtree(tmp_path / "model" / part)
    (tmp_path / "model" / FILE).write_text(json.dumps(ALL))
    return tmp_path / "model"


def test_it_generates_what_a_folder_with_its_own_parts_generates(folder: Path, tmp_path: Path) -> None:
    pipe = open_pipeline(folder)
    assert pipe.normalize_prompt("😺").text != "😺", "names come along"
    generated = pipe("a red apple", generator=torch.Generator().manual_seed(1), output_type="latent").images
    pipe.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole" / "text_encoder").is_dir() and not (tmp_path / "whole" / FILE).exists()
    whole = open_pipeline(tmp_path / "whole")
    assert torch.equal(generated, whole("a red apple", generator=torch.Generator().manual_seed(1), output_type="latent").images)


def test_saved_over_a_borrower_it_borrows_no_more(folder: Path) -> None:
    open_pipeline(folder).save_pretrained(folder)
    assert not (folder / FILE).exists() and inspect_model(folder).condition == "text"


def test_what_a_caller_brings_is_not_borrowed(folder: Path) -> None:
    assert open_pipeline(folder, text_encoder=None, tokenizer=None).text_encoder is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"text_encoder": "nobody"}, "must name packaged models"),
        ({"text_encoder": "../emoji"}, "must name packaged models"),
        ({"transformer": "emoji"}, "must name packaged models"),
        ({"text_encoder": 3}, "must name packaged models"),
        (["text_encoder"], "must hold a JSON object"),
        ({"prompt_names": "emoji"}, "config.json is missing"),
    ],
)
def test_what_cannot_be_borrowed_is_reported_before_a_weight_is_loaded(folder: Path, said: object, message: str) -> None:
    (folder / FILE).write_text(json.dumps(said))
    rejects(lambda: inspect_model(folder), message)


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / FILE).write_text("{")
    with pytest.raises(ValueError, match=FILE):
        open_pipeline(folder)

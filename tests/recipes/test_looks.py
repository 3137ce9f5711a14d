"""Generated images are looked at: by the scorer, and by raters who do not know the prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import text_pipeline
from typer.testing import CliRunner

from recipes.__main__ import app


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def text_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    text_pipeline().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


def test_a_sheet_for_raters_is_generated(text_model: Path) -> None:
    Path("prompts.txt").write_text("# two\na cat\na dog\n")
    result = run("sheet", "--model", text_model, "--prompt-file", "prompts.txt", "-o", "sheet.png", "--temperature", 0.8)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"sheet": "sheet.png", "key": "sheet.key.json", "images": 2}
    assert sorted(json.loads(Path("sheet.key.json").read_text()).values()) == ["a cat", "a dog"]
    assert Path("sheet.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("verb", ["recall", "sheet"])
def test_a_transformer_that_is_none_is_named(text_model: Path, verb: str) -> None:
    Path("empty").mkdir()
    more = ("-o", "sheet.png") if verb == "sheet" else ()
    result = run(verb, "--model", text_model, "--transformer", "empty", *more)
    assert result.exit_code == 2 and "transformer must be a run's folder with transformer/" in result.output

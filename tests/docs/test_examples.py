"""examples/ run as their first lines say, on a tiny model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def example(tiny_model: Path, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, "a green turtle", "--model", str(tiny_model), "--seed", "3"])
        runpy.run_path(str(repo_root / "examples" / name), run_name="__main__")

    return run


def test_generate_generates_one_image_twice(example, capsys: pytest.CaptureFixture[str]) -> None:
    example("generate.py")
    reported = capsys.readouterr().out
    assert "the same picture, pixel for pixel" in reported and "ar.png: 36 passes, 1.00 tokens a pass" in reported
    assert Image.open("ar.png").tobytes() == Image.open("gumbel.png").tobytes()


def test_compose_verifies_its_method_and_generates_with_it(example, capsys: pytest.CaptureFixture[str]) -> None:
    example("compose.py")
    reported = capsys.readouterr().out
    assert "mine is exact: total variation distance" in reported
    assert Path("mine.png").is_file() and "mine: " in reported


def test_a_function_of_ones_own_is_summed(example, capsys: pytest.CaptureFixture[str]) -> None:
    example("check_function.py")
    assert "total variation distance to the target: " in capsys.readouterr().out


def test_assisted_generation_samples_the_tokens_of_plain_decoding(example, capsys: pytest.CaptureFixture[str]) -> None:
    example("assisted_generation.py")
    assert "the same sampled tokens: True" in capsys.readouterr().out


def test_every_example_is_tested(repo_root: Path) -> None:
    tests = Path(__file__).read_text()
    assert all(f'example("{path.name}")' in tests for path in (repo_root / "examples").glob("*.py"))

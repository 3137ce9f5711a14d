"""examples/ run as their first lines say, on a tiny model; the notebook is valid, has no outputs, and runs top to bottom."""

from __future__ import annotations

import json
import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

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


def test_images_of_reinforcement_learning_have_the_log_probabilities_of_the_model(
    example, capsys: pytest.CaptureFixture[str]
) -> None:
    """It checks them in each step, also after the adapters changed."""
    example("grpo.py")
    assert "step 11: reward" in capsys.readouterr().out and Path("adapters.safetensors").is_file()


@pytest.mark.slow
def test_reinforcement_learning_raises_the_reward(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the packaged model, by the packaged scorer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo.py", "a fish", "--steps", "10"])
    runpy.run_path(str(repo_root / "examples/grpo.py"), run_name="__main__")
    rewards = [float(each) for each in re.findall(r"reward ([\d.-]+)", capsys.readouterr().out)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:3]) / 3 + 0.5


def test_every_example_is_tested(repo_root: Path) -> None:
    tests = Path(__file__).read_text()
    assert all(f'example("{path.name}")' in tests for path in (repo_root / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def notebook(repo_root: Path) -> dict[str, Any]:
    return json.loads((repo_root / "examples/diffusers.ipynb").read_text("utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_it_is_a_notebook_without_outputs(notebook: dict[str, Any]) -> None:
    assert notebook["nbformat"] == 4 and notebook["nbformat_minor"] >= 5, "cells have ids since 4.5"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in names)
    common = {"cell_type", "id", "metadata", "source"}
    for cell in notebook["cells"]:
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "markdown":
            assert cell.keys() == common
        else:
            assert cell["cell_type"] == "code" and cell.keys() == common | {"execution_count", "outputs"}
            assert cell["execution_count"] is None and cell["outputs"] == []


def test_it_opens_on_colab_and_installs_from_the_repository_once_there_is_one(
    notebook: dict[str, Any], repo_root: Path
) -> None:
    source = tomllib.loads((repo_root / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {}).get("Source")
    if source is None:
        assert "http" not in json.dumps(notebook["cells"]), "leads nowhere"
        return
    place = re.sub(r"^https://(github\.com/)?", "", source)
    colab = f"https://colab.research.google.com/github/{place}/blob/main/examples/diffusers.ipynb"
    first = "".join(notebook["cells"][0]["source"])
    assert first.startswith("[![Open in Colab](") and f"]({colab})" in first
    assert f'"vargen @ git+{source}"' in code_cells(notebook)[0]


@pytest.mark.parametrize("packaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_runs_top_to_bottom(
    packaged: bool,
    notebook: dict[str, Any],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a tiny model; the slow test takes the packaged one, as it is written."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for number, code in enumerate(code_cells(notebook)):
        code = code if packaged else code.replace('"emoji"', repr(str(tiny_model)))
        exec(compile(code, f"cell {number}", "exec"), scope)
    reported, tokens = capsys.readouterr().out, scope["pipe"].num_tokens
    assert f"ar: {tokens} passes, 1.00 tokens per pass" in reported and "\nidentical\n" in reported
    assert f"{2 * tokens} tokens in {len(scope['steps'])} passes" in reported and "gumbel, exact: " in reported
    assert 1 < len(scope["steps"]) <= tokens and not list(tmp_path.iterdir())

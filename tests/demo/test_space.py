"""examples/space is what a Space needs: front matter, requirements that agree with pyproject.toml, and a page on its port."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vargen import __version__
from vargen.cli import main as cli
from vargen.demo import launch

COLORS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}


@pytest.fixture
def space(repo_root: Path) -> Path:
    return repo_root / "examples/space"


@pytest.fixture
def project(repo_root: Path) -> dict[str, Any]:
    return tomllib.loads((repo_root / "pyproject.toml").read_text("utf-8"))["project"]


def pinned(repo_root: Path, name: str) -> str:
    lines = (repo_root / "constraints.txt").read_text("utf-8").splitlines()
    (version,) = (line.removeprefix(f"{name}==").split()[0] for line in lines if line.startswith(f"{name}=="))
    return version


def test_the_front_matter_is_that_of_a_gradio_space(space: Path, project: dict[str, Any], repo_root: Path) -> None:
    opening, front, page = (space / "README.md").read_text("utf-8").split("---\n", 2)
    fields = yaml.safe_load(front)
    assert opening == "" and page.strip().startswith("# ")
    assert fields["sdk"] == "gradio" and (space / fields["app_file"]).is_file()
    (gradio,) = map(Requirement, project["optional-dependencies"]["demo"])
    assert fields["sdk_version"] in gradio.specifier and fields["sdk_version"] == pinned(repo_root, "gradio")
    assert isinstance(fields["python_version"], str) and fields["python_version"] in SpecifierSet(project["requires-python"])
    assert {fields["colorFrom"], fields["colorTo"]} <= COLORS and len(fields["short_description"]) <= 60
    assert fields["title"] == project["name"] and fields["license"] == project["license"].lower()


def test_requirements_are_the_cpu_build_of_torch_and_this_package(
    space: Path, project: dict[str, Any], repo_root: Path
) -> None:
    index, *lines = (space / "requirements.txt").read_text("utf-8").splitlines()
    assert index == "--extra-index-url https://download.pytorch.org/whl/cpu"
    torch = Requirement(lines[0])
    assert str(torch) == f"torch=={pinned(repo_root, 'torch')}+cpu"
    (range_,) = (each.specifier for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    assert pinned(repo_root, "torch") in range_
    assert (
        lines[1:] == [f"./{project['name']}-{__version__}-py3-none-any.whl[demo]"]
        and "demo" in project["optional-dependencies"]
    )


def test_its_app_builds_the_page_and_serves_it_to_all(space: Path, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[gr.Blocks, str, int | None]] = []

    def serve(page: gr.Blocks, host: str, port: int | None) -> str:
        served.append((page, host, port))
        monkeypatch.setattr(page, "block_thread", lambda: None)
        return ""

    loaded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "load_models", lambda *given: loaded.append(given) or models)
    monkeypatch.setattr(launch, "serve", serve)
    monkeypatch.setattr(launch, "validate_address", lambda *_: None)  # other tests may use this port
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    for variable in ("GRADIO_ANALYTICS_ENABLED", "GRADIO_TEMP_DIR", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(variable, "")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(space / "app.py"), run_name="__main__")
    assert ended.value.code == 0
    ((page, *address),) = served
    assert loaded == [(launch.DEFAULT_MODEL, "auto", None)]
    assert address == ["0.0.0.0", 7860]
    assert "Generate" in {block.value for block in page.blocks.values() if isinstance(block, gr.Button)}

"""The pages keep their promises: links lead somewhere, commands and options exist, code compiles, tables say what is so."""

from __future__ import annotations

import ast
import importlib
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from markdown import anchors, blocks, commands, links, pages, prose
from tiny_families import brightness
from tiny_glm_pipeline import make_glm_pipeline
from tiny_helios import SIZE, make_base, make_distilled
from tiny_language_models import has_release, make_janus, needs_janus
from typer.testing import CliRunner

import vargen
import vargen.decoding
import vargen.decoding.experimental
from vargen.cli.main import app
from vargen.decoding import PRESETS, Accelerator
from vargen.models.transformers.base import ImageLanguageModel

ROOT = Path(__file__).resolve().parents[2]
PAGES = pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages(ROOT)])
# What was written once keeps the commands of its time.
DATED = {ROOT / "CHANGELOG.md", ROOT / "docs" / "dev" / "log.md", *(ROOT / "benchmarks").glob("*_20*.md")}
CURRENT_PAGES = pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages(ROOT) if page not in DATED]
)
README = ROOT / "README.md"


@PAGES
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link!r} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link!r}: no such heading"


@CURRENT_PAGES
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in commands(page, "vargen"):
        command: Any = typer.main.get_command(app)
        while words:  # a context reads options and arguments as a run would, and raises what is wrong
            context = command.make_context(command.name, list(words))
            if not hasattr(command, "resolve_command") or words[0].startswith("-"):  # a verb, or options of a group alone
                break
            _, command, words = command.resolve_command(context, words)


@CURRENT_PAGES
def test_commands_within_sentences_exist(page: Path) -> None:
    """Of these the arguments may be made up; verbs and options are not."""
    for text in re.findall(r"`vargen ([^`]+)`", prose(page)):
        command: Any = typer.main.get_command(app)
        words = text.split()
        while hasattr(command, "resolve_command") and words and not words[0].startswith("-"):
            _, command, words = command.resolve_command(command.make_context("vargen", list(words)), words)
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, text


@CURRENT_PAGES
def test_code_compiles_and_what_it_imports_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        tree = ast.parse(block.code)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vargen":
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name), f"{node.module} has no {name.name}"


# -- the README


def test_the_readme_is_short() -> None:
    """By `wc -w`: prose, tables and code together."""
    assert len(README.read_text("utf-8").split()) <= 750, "move something to docs/"


def test_a_pass_is_shown_as_the_loop_has_it() -> None:
    source = (ROOT / "vargen/decoding/token_pass.py").read_text()
    page = ROOT / "docs/methods.md"
    shown = next(block.code for block in blocks(page, "python") if "drafter.propose" in block.code)
    assert textwrap.indent(shown, " " * 8) in source


CORE = "auto ar gumbel sjd scd gsd mulo mulo-exact speculative eagle medusa lantern plain code target sdvg stride".split()


def test_the_readme_names_the_core_methods_and_their_kinds() -> None:
    table = prose(README).split("## Methods")[1].split("\n## ")[0]
    found = re.findall(r"^\| ((?:`[\w-]+`(?:[,;] )?)+)[^|]*\|.*\| ([^|]*) \|$", table, flags=re.MULTILINE)
    rows = {name: result for names, result in found for name in re.findall(r"`([\w-]+)`", names) if name in PRESETS}
    assert sorted(rows) == sorted(CORE)
    for name, result in rows.items():
        assert ("relaxed" in result) == (PRESETS[name].kind == "relaxed"), name
        assert not PRESETS[name].experimental, name


def test_the_readme_says_what_was_measured() -> None:
    section = prose(README).split("## Measured")[1].split("\n## ")[0]
    figures, unseen = [link for link in links(README) if link.endswith(".json")]
    report = json.loads((ROOT / figures).read_text())
    known = {method["name"]: method for method in report["methods"]}
    others = {method["name"]: method for method in json.loads((ROOT / unseen).read_text())["methods"]}
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", section, flags=re.MULTILINE)
    assert len(rows) > 5 and [name for name, _ in rows] == sorted((name for name, _ in rows), key=list(PRESETS).index)
    assert "of 16" in section and {method["images"] for method in known.values()} == {16}
    for name, said in rows:
        method = known[name]
        true = [method["tokens_per_pass"], others[name]["tokens_per_pass"], method["ratio"]]
        cells = [cell.strip() for cell in said.split("|")]
        assert cells == [*(f"{value:.2f}" for value in true), str(method["same_as_baseline"])], name
    one = report["cost_curve"]["1"]
    curve = {width: seconds / one for width, seconds in report["cost_curve"].items()}
    said = re.findall(r"a pass over (\d+) tokens took\s+([\d.]+)?", section, flags=re.IGNORECASE)
    assert said
    for width, times in said:
        assert not times or times == f"{curve[width]:.2f}"


def test_the_readme_counts_lines_of_code() -> None:
    """As `git ls-files 'FOLDER/*.py' | xargs cat | wc -l` does, to a tenth."""
    section = README.read_text("utf-8").split("## Code")[1]
    rows = re.findall(r"^([\w/]+)(?:\{([\w,]+)\})?/ +([\d,]+)", section, flags=re.MULTILINE)
    assert len(rows) == len(re.search(r"```\n(.*?)```", section, flags=re.DOTALL)[1].splitlines())  # type: ignore[index]
    for folder, parts, said in rows:
        files = [path for part in parts.split(",") for path in (ROOT / folder / part).rglob("*.py")]
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in files)
        assert abs(lines / int(said.replace(",", "")) - 1) < 0.1, f"{folder}{parts}: {lines}"


@pytest.mark.extended
def test_proofs_come_out_as_pages_show_them() -> None:
    """The line of the README, and the extract of docs/exactness.md from the table of all methods."""

    def run(*words: str) -> set[str]:
        result = CliRunner().invoke(app, ["verify", *words])
        assert result.exit_code == 0, result.output
        return {" ".join(line.split()) for line in result.stdout.splitlines()}

    (shown,) = [block.code for block in blocks(README, "") if "$ vargen verify scd" in block.code]
    assert set(shown.splitlines()[1:]) <= run("scd")
    (extract,) = [block.code for block in blocks(ROOT / "docs/exactness.md", "") if "worst distance" in block.code]
    assert {" ".join(line.split()) for line in extract.splitlines()} <= {"", *run()}


@pytest.mark.slow
def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python blocks, one after the other."""
    monkeypatch.chdir(tmp_path)
    model, processor = make_janus()
    scope: dict[str, Any] = {"model": model, "inputs": processor(text=["a cat"], generation_mode="image", return_tensors="pt")}
    for block in blocks(README, "python"):
        exec(compile(block.code, block.page, "exec"), scope)
    assert (tmp_path / "apple.png").is_file()
    assert scope["result"].stats.accelerator == "gumbel" and scope["result"].stats.tokens_per_pass > 1


# -- other pages


def test_every_method_is_described_as_it_is() -> None:
    """Core presets by a section each, experimental ones by a row; in both, the composition is that of the preset."""
    page = (ROOT / "docs/methods.md").read_text("utf-8")
    sections = {part.split("`")[0]: part for part in re.split(r"^### `", page, flags=re.MULTILINE)[1:]}
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+)[^|]* \| .* \| `(\w+\(.*\))` \|$", page, flags=re.MULTILINE)
    assert list(sections) == [name for name, preset in PRESETS.items() if not preset.experimental]
    assert [name for name, *_ in rows] == [name for name, preset in PRESETS.items() if preset.experimental]
    described = {
        name: (re.findall(r"\*\*(\w+)", section)[0].lower(), re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0])
        for name, section in sections.items()
    } | {name: (kind, code) for name, kind, code in rows}
    for name, (kind, code) in described.items():
        composed = eval(code, {**vars(vargen.decoding), **vars(vargen.decoding.experimental), "Accelerator": Accelerator})
        assert composed.spec() == PRESETS[name].spec(), name
        assert kind == PRESETS[name].kind, name


@pytest.mark.extended
def test_the_guide_runs(tiny_model: Path, video_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tiny models of tokens and of video, instead of the packaged ones."""
    scope = run_page("guide", {"emoji": tiny_model, "emoji-video": video_model}, tmp_path, monkeypatch)
    assert scope["inpainted"].size == scope["image"].size and (tmp_path / "wink.webp").stat().st_size
    assert len(scope["result"].stats.blocks) == 8, "the last result is a video's"


@pytest.mark.extended
@pytest.mark.parametrize("page", ["exactness", "performance"])
def test_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_page(page, {}, tmp_path, monkeypatch)


@needs_janus
def test_language_models_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Janus of random weights."""
    folder = tmp_path / "janus"
    for part in make_janus():
        part.save_pretrained(folder)
    scope = run_page("models", {"deepseek-community/Janus-Pro-1B": folder}, tmp_path, monkeypatch, about="Janus")
    assert scope["result"].stats.accelerator == "gumbel"


def test_helios_runs(tmp_path: Path) -> None:
    """The page's block on tiny pipelines of diffusers, with a scorer that needs no weights."""
    pytest.importorskip("ftfy")
    code = next(block.code for block in blocks(ROOT / "docs/models.md", "python") if "distilled" in block.code)
    code = code.replace("num_frames=132", "num_frames=10, **small").replace('"image-reward"', "scorer")
    scope = {"vargen": vargen, "base": make_base(tmp_path), "distilled": make_distilled(), "prompt": "a cat"}
    exec(compile(code, "models.md", "exec"), scope | {"scorer": brightness, "small": {**SIZE, "num_inference_steps": 1}}, scope)
    assert scope["result"].stats.accelerator == "sdvg" and len(scope["result"].frames[0]) == 17


@needs_janus
def test_enabling_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's blocks in turn, on tiny models: a Janus, a pipeline of diffusers, a description."""
    monkeypatch.chdir(tmp_path)
    first, second, third = (block.code for block in blocks(ROOT / "docs/enable.md", "python"))
    model, processor = make_janus()
    inputs = processor(text=["a red apple"], generation_mode="image", return_tensors="pt")
    exec(compile(first, "enable.md", "exec"), {"model": model, "inputs": inputs})
    assert "passes" in capsys.readouterr().out and "generate" not in vars(model)
    scope = {"torch": torch, "ImageLanguageModel": ImageLanguageModel, "MODELS": (models := {})}
    exec(compile(third, "enable.md", "exec"), scope)
    assert list(models) == ["MineForCausalLM"]
    if has_release("glm-image"):
        import diffusers

        make_glm_pipeline().save_pretrained(tmp_path / "glm")
        scope = {"torch": torch, "vargen": vargen, "GlmImagePipeline": diffusers.GlmImagePipeline}
        second = second.replace('"zai-org/GLM-Image"', '"glm"').replace("1024", "64")
        exec(compile(second, "enable.md", "exec"), scope)
        assert scope["image"].size == (64, 64) and vargen.summary(scope["pipe"]).calls == 1


def run_page(
    name: str, folders: dict[str, Path], place: Path, monkeypatch: pytest.MonkeyPatch, about: str = ""
) -> dict[str, Any]:
    """Run the Python blocks of a page that contain `about` in turn, with models of `folders` for those that it names."""
    monkeypatch.chdir(place)
    scope: dict[str, Any] = {}
    for block in blocks(ROOT / f"docs/{name}.md", "python"):
        code = block.code if about in block.code else ""
        for model, folder in folders.items():
            code = code.replace(f'"{model}"', repr(str(folder)))
        exec(compile(code, block.page, "exec"), scope)
    return scope

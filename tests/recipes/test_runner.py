"""`python -m recipes`: every recipe is valid, takes what others make, and names what is wrong before anything runs."""

import dataclasses
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rejects import rejects
from typer.testing import CliRunner

import vargen.assets
from recipes import registry, runner
from recipes.__main__ import app
from recipes.emoji.tokenizer import TokenizerConfig
from recipes.emoji_var.tokenizer import MultiScaleTokenizerConfig
from recipes.registry import RECIPES
from vargen.training.config import Schedule, load_config

TRAINED = [name for name, recipe in RECIPES.items() if not recipe.cached]
TINY = """
batch_size = 2
crop = 16
autoencoder_steps = 1
[schedule]
steps = 500
[model]
codebook_size = 16
ch = 32
encoder_ch_mult = [1, 1]
decoder_ch_mult = [1, 1]
num_res_blocks = 1
z_channels = 32
"""


def load(name: str, steps: int | None = None, **settings: Any) -> Any:
    return runner.load_settings(name, None, steps, settings)


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A data set of 24 random 16 x 16 images."""
    folder = tmp_path / "data"
    folder.mkdir()
    np.save(folder / "images.npy", np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8))
    records = [{"weight": 1.0, "split": "validation" if i % 6 == 0 else "train"} for i in range(24)]
    (folder / "records.json").write_text(json.dumps(records))
    return folder


@pytest.mark.parametrize("name", TRAINED)
def test_every_recipe_has_valid_settings(name: str) -> None:
    model = load(name).model
    assert model.get("vocab_size", 4096) == model.get("codebook_size", 4096) == 4096


def test_every_file_of_settings_belongs_to_a_recipe() -> None:
    files = {file.stem for folder in runner.FOLDERS for file in folder.glob("*.toml")}
    assert files == {RECIPES[name].file or name for name in TRAINED}


def test_inputs_come_from_recipes_that_make_them_or_from_packaged_models() -> None:
    for name, recipe in RECIPES.items():
        for key, item in recipe.inputs.items():
            assert not (item.recipe and item.packaged), (name, key)
            if item.recipe:
                made = RECIPES[item.recipe]
                assert made.cached or made.produces == item.part, (name, key)
            if item.packaged:
                assert (registry.PACKAGED / item.packaged / item.part).is_dir(), (name, key)
    for name, runs in runner.PACKAGES.items():
        assert all(recipe in RECIPES or recipe == "router" for recipe in runs.values()), name


@pytest.mark.parametrize("name", TRAINED)
def test_every_recipe_takes_or_refuses_a_run_of_one_step(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A tokenizer has parts that need their steps; a warm-up is cut, and that is logged."""
    caplog.set_level("WARNING", "vargen")
    whole = load(name)
    if getattr(whole, "autoencoder_steps", 0):
        rejects(lambda: load(name, 1), "steps")
        least = whole.autoencoder_steps + whole.decoder_steps + 1
        assert load(name, least).schedule.steps == least
    else:
        config = load(name, 1)
        assert (config.schedule.steps, config.schedule.warmup_steps) == (1, 1) and config.schedule.factor(0) == 1
        assert "warm-up" in caplog.text


def test_steps_of_a_tokenizer_must_hold_its_parts() -> None:
    for autoencoder, decoder, steps in ((5, 5, 10), (0, 1, 1), (3, 0, 3)):
        with pytest.raises(ValueError, match=f"steps must be at least {autoencoder + decoder + 1}, got {steps}"):
            TokenizerConfig({}, Schedule(steps=steps), autoencoder_steps=autoencoder, decoder_steps=decoder)
    for wrong in ("autoencoder_steps", "decoder_steps"):
        with pytest.raises(ValueError, match=wrong):
            TokenizerConfig({}, **{wrong: -1})


def test_sampling_weights_are_part_of_a_multi_scale_tokenizer(folder: Path) -> None:
    text = "[model]\nch = 32\n[schedule]\nsteps = 500\n[sampling_weights]\nskin_tones = 0.5\nstyles = {noto = 2}\n"
    Path("mine.toml").write_text(text)
    weights = load_config("mine.toml", MultiScaleTokenizerConfig).sampling_weights
    assert (weights.skin_tones, weights.styles) == (0.5, {"noto": 2})
    Path("mine.toml").write_text("[model]\nch = 32\n[sampling_weights]\nstyles = {noto = -2}\n")
    rejects(lambda: load_config("mine.toml", MultiScaleTokenizerConfig), "styles")


def test_a_recipe_is_trained_with_the_settings_asked_for(images: Path) -> None:
    Path("tiny.toml").write_text(TINY)
    words = ("--config", "tiny.toml", "--input", f"data={images}", "--steps", 3, "--set", "batch_size=3", "--set", "seed=5")
    result = run("emoji-tokenizer", *words)
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)
    assert metrics["output"] == "runs/emoji-tokenizer/vqvae" and metrics["psnr"] > 0
    assert json.loads(Path("runs/emoji-tokenizer/log.jsonl").read_text().splitlines()[-1])["step"] == 3
    state = torch.load("runs/emoji-tokenizer/checkpoint.pt", weights_only=True)
    assert state["settings"]["seed"] == 5


def test_a_trainer_gets_its_inputs_by_argument(images: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def train(config: Any, **arguments: Any) -> dict[str, float]:
        seen.update(arguments, config=config)
        return {"loss": 1.5}

    monkeypatch.setitem(RECIPES, "emoji-var-small", dataclasses.replace(RECIPES["emoji-var-small"], run=train))
    for network in ("runs/emoji-var-tokenizer/vqvae", "runs/emoji-var/transformer", "start/transformer"):
        Path(network).mkdir(parents=True)
        Path(network, "config.json").write_text("{}")
    result = run("emoji-var-small", "--input", f"data={images}", "--input", "init=start", "--steps", 7, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"output": "runs/emoji-var-small/transformer", "loss": 1.5}
    assert seen["config"].schedule.steps == 7 and len(seen["data"].records) == 24 and seen["device"].type == "cpu"
    assert seen["tokenizer_folder"] == Path("runs/emoji-var-tokenizer/vqvae") and seen["folder"] == Path("runs/emoji-var-small")
    assert seen["teacher_folder"] == Path("runs/emoji-var/transformer") and seen["init_folder"] == Path("start/transformer")
    assert seen["text_encoder_folder"].samefile(repo_root / "assets" / "emoji")


def test_data_is_built_where_asked(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def build(folder: Path, size: int) -> Any:
        built.extend((folder, size))
        return registry.load_emoji_dataset(images)

    monkeypatch.setattr(registry, "build_emoji_dataset", build)
    result = run("emoji-data", "--output", "there", "--set", "size=32")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert built == [Path("there"), 32] and found["output"] == "there"
    assert (found["records"], found["train"], found["validation"]) == (24, 20, 4)


def test_a_package_joins_the_runs_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(runner, "package_emoji", lambda *given: seen.extend(given))
    runs = ("--run", "tokenizer=a", "--run", "drafter=d", "--output", "c")
    result = run("package", "emoji", *runs, "--note", "two cores", "--recall", "e", "--set", "guidance_scale=2.5")
    assert result.exit_code == 0, result.output
    tokenizer, generator, encoder, output, defaults, note, drafter, recall = seen
    assert (tokenizer, generator, drafter) == (Path("a"), Path("runs/emoji-generator"), Path("d"))
    assert (output, defaults, note, recall) == (Path("c"), {"guidance_scale": 2.5}, "two cores", Path("e"))
    assert Path(encoder).samefile(vargen.assets.packaged_model_path("emoji"))
    assert json.loads(result.stdout)["runs"]["generator"] == "runs/emoji-generator"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["emoji-tokenizer", "--config", "nothing"], ["'nothing'", "emoji-tokenizer"]),
        (["emoji-tokenizer", "--config", "bad.toml"], ["'batch_sise'", "'batch_size'"]),
        (["emoji-tokenizer", "--set", "batch_sise=3"], ["'batch_sise'", "'batch_size'"]),
        (["emoji-tokenizer", "--set", "batch_size"], ["--set", "KEY=VALUE"]),
        (["emoji-tokenizer", "--steps", "0"], ["steps"]),
        (["emoji-tokenizer", "--steps", "1"], ["steps", "autoencoder_steps (300)"]),
        (["emoji-tokenizer", "--device", "tpu"], ["--device"]),
        (["emoji-tokenizer", "--input", "data=empty"], ["images.npy is missing", "python -m recipes emoji-data"]),
        (["emoji-tokenizer", "--input", "vae=empty"], ["'vae'", "data"]),
        (["emoji-tokenizer", "--input", "data"], ["--input", "KEY=VALUE"]),
        (["emoji-tokenizer", "--input", "data=~nosuchuser/"], ["data '~nosuchuser'"]),
        (["emoji-tokenizer", "--output", "~nosuchuser/x"], ["output '~nosuchuser/x'"]),
        (["emoji-generator", "--input", "data=data"], ["tokenizer", "python -m recipes emoji-tokenizer"]),
        (["emoji-generator", "--input", "tokenizer=empty", "--input", "data=data"], ["tokenizer", "'empty'"]),
        (["emoji-low-res", "--input", "text-encoder=empty", "--input", "data=data"], ["text-encoder 'empty'"]),
        (["emoji-data", "--steps", "3"], ["steps"]),
        (["emoji-data", "--set", "size=4"], ["size must be at least 8"]),
        (["package", "emoji", "--run", "tokenizer=empty", "--output", "o"], ["empty/vqvae is missing"]),
        (["package", "emoji", "--run", "vae=empty"], ["'vae'", "tokenizer"]),
        (["package", "emoji", "--set", "top_p=2"], ["top_p"]),
        (["package", "emoji-video", "--set", "tau=nan"], ["tau"]),
        (["package", "emoji-video", "--set", "scored_frames=0"], ["scored_frames"]),
        (["package", "emoji-scorer", "--set", "top_p=0.5"], ["--set"]),
        (["package", "emoji-var", "--recall", "x"], ["recall"]),
        (["package", "emoji-vra"], ["'emoji-vra'", "emoji-var"]),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(images: Path, words: list[str], named: list[str]) -> None:
    Path("empty").mkdir()
    Path("data").symlink_to(images)
    Path("bad.toml").write_text("batch_sise = 3\n[model]\n")
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    for part in named:
        assert part in result.stderr, result.stderr
    assert sorted(p.name for p in Path().iterdir()) == ["bad.toml", "data", "empty"]


def test_it_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["recipes", "list"])
    monkeypatch.delitem(sys.modules, "recipes.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recipes", run_name="__main__")
    listed = capsys.readouterr().out
    assert ended.value.code == 0 and all(name in listed for name in RECIPES)


def test_every_recipe_is_documented(repo_root: Path) -> None:
    text = (repo_root / "recipes" / "README.md").read_text("utf-8")
    for name in RECIPES:
        assert f"`{name}`" in text or f"python -m recipes {name}" in text, name


def test_commands_of_pages_and_cards_exist(repo_root: Path) -> None:
    pages = [repo_root / "README.md", *(repo_root / "docs").glob("*.md"), *(repo_root / "assets").rglob("*.md")]
    pages += (repo_root / "recipes").rglob("*.md")
    commands = {command.name for command in app.registered_commands}
    pattern = re.compile(r"python -m recipes ([a-z][-a-z]*)(?: ([a-z][-a-z]*))?")
    named = [words for page in pages for words in pattern.findall(page.read_text("utf-8").replace("$kind", "eagle"))]
    assert len(named) > 20
    for command, argument in named:
        assert command in commands, command
        assert command != "package" or argument in runner.PACKAGES, argument


def test_the_command_needs_nothing_of_the_demo(repo_root):
    """The extra `train` has no gradio, and neither have machines that are made for training."""
    lines = "import runpy, sys", "sys.modules['gradio'] = None", "sys.argv = ['recipes', 'list']"
    code = "; ".join([*lines, "runpy.run_module('recipes', run_name='__main__')"])
    run = subprocess.run([sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "emoji-generator" in run.stdout, run.stderr

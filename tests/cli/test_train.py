"""`vargen train`: options reach the recipes, results are JSON, mistakes are named before anything runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

RECIPE = """
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


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A data set of 24 random 16 x 16 pictures."""
    folder = tmp_path / "data"
    folder.mkdir()
    np.save(folder / "images.npy", np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8))
    records = [{"weight": 1.0, "split": "validation" if i % 6 == 0 else "train"} for i in range(24)]
    (folder / "records.json").write_text(json.dumps(records))
    return folder


def test_tokenizer_is_trained_for_the_steps_asked_for(run: Any, pictures: Path) -> None:
    Path("tiny.toml").write_text(RECIPE)
    result = run("train", "tokenizer", "--config", "tiny.toml", "--data", pictures, "--output", "run", "--steps", 3)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["model"] == "run/vqvae" and figures["psnr"] > 0
    assert Path("run/vqvae/config.json").is_file()
    assert json.loads(Path("run/log.jsonl").read_text().splitlines()[-1])["step"] == 3


VAR_RECIPE = """
batch_size = 2
autoencoder_steps = 1
[schedule]
steps = 500
[model]
architecture = "hybrid"
codebook_size = 16
codebook_embed_dim = 4
ch = 16
ch_mult = [1, 2]
num_res_blocks = 1
transformer_blocks = 1
patch_size = 2
scales = [1, 2, 4]
"""


def test_var_tokenizer_is_trained_for_the_steps_asked_for(run: Any, pictures: Path) -> None:
    Path("tiny.toml").write_text(VAR_RECIPE)
    result = run("train", "var-tokenizer", "--config", "tiny.toml", "--data", pictures, "--output", "run", "--steps", 3)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["model"] == "run/vqvae" and figures["psnr"] > 0 and figures["use_2"] > 0
    assert json.loads(Path("run/vqvae/config.json").read_text())["_class_name"] == "MultiScaleVQModel"
    result = run("train", "var-tokenizer", "--config", "tiny.toml", "--data", pictures, "--output", "run", "--steps", 1)
    assert result.exit_code == 2 and "steps must be at least 2" in result.stderr


def test_generator_gets_its_recipe_and_folders(
    run: Any, pictures: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vargen.training import next_token as generator

    seen: dict[str, Any] = {}

    def train(recipe: Any, data: Any, tokenizer: Path, encoder: Path, folder: Path, device: Any, init: Any) -> dict[str, float]:
        seen.update(recipe=recipe, data=data, tokenizer=tokenizer, encoder=encoder, folder=folder, device=device)
        return {"held_out_loss": 1.5}

    monkeypatch.setattr(generator, "train_next_token", train)
    Path("codes/vqvae").mkdir(parents=True)
    Path("codes/vqvae/config.json").write_text("{}")
    words = ("--tokenizer", "codes", "--data", pictures, "--output", "run", "--steps", 7, "--device", "cpu")
    result = run("train", "generator", *words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"model": "run/transformer", "held_out_loss": 1.5}
    assert seen["recipe"].schedule.steps == 7 and len(seen["data"].records) == 24
    assert seen["tokenizer"] == Path("codes/vqvae") and seen["folder"] == Path("run")
    assert seen["encoder"].samefile(repo_root / "assets" / "emoji") and seen["device"].type == "cpu"


def test_data_is_built_where_asked(run: Any, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes.emoji import dataset as emoji

    monkeypatch.setattr(emoji, "build_emoji_dataset", lambda output, size: emoji.load_emoji_dataset(pictures))
    result = run("train", "data", "--output", "there", "--size", 32)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["folder"] == "there" and found["pictures"] == 24 and found["validation"] == 4 and found["train"] == 20


def test_package_joins_the_runs_named(run: Any, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes import package

    seen: list[Any] = []

    def join(*folders: Path, defaults: dict[str, Any], note: str, **files: Path | None) -> Path:
        seen.extend([*folders, defaults, note, files])
        return folders[-1]

    monkeypatch.setattr(package, "package", join)
    words = ("--tokenizer", "a", "--generator", "b", "--output", "c", "--note", "two cores", "--drafter", "d", "--recall", "e")
    result = run("train", "package", *words, "--guidance-scale", "2.5")
    assert (result.exit_code, result.stdout) == (0, "c\n"), result.output
    tokenizer, generator, encoder, output, defaults, note, files = seen
    assert defaults == {"guidance_scale": 2.5}
    assert (tokenizer, generator, output, note) == (Path("a"), Path("b"), Path("c"), "two cores")
    assert files == {"drafter_run": Path("d"), "recall": Path("e")}
    assert encoder.samefile(repo_root / "assets" / "emoji")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tokenizer", "--config", "nothing"], ["recipe 'nothing'", "emoji-tokenizer"]),
        (["tokenizer", "--config", "bad.toml"], ["unknown key 'batch_sise'", "'batch_size'"]),
        (["tokenizer", "--config", "emoji-tokenizer", "--data", "empty"], ["images.npy is missing", "vargen train data"]),
        (["tokenizer", "--steps", "0"], ["steps must be", "at least 1"]),
        (["tokenizer", "--device", "tpu"], ["--device"]),
        (["generator", "--tokenizer", "empty"], ["tokenizer must be a run's folder"]),
        (["generator", "--tokenizer", "empty", "--text-encoder", "empty"], ["text_encoder folder 'empty'"]),
        (["generator"], ["--tokenizer"]),
        (["package", "--tokenizer", "empty", "--generator", "empty", "--output", "o"], ["empty/vqvae is missing"]),
        (["data", "--size", "4"], ["size must be at least 8"]),
        (["tokenizer", "--steps", "1"], ["emoji-tokenizer.toml: steps must be at least", "got 1: autoencoder_steps (300)"]),
        (["tokenizer", "--config", "~nosuchuser/a.toml"], ["config '~nosuchuser/a.toml' begins with a home folder"]),
        (["tokenizer", "--data", "~nosuchuser/"], ["data '~nosuchuser' begins with a home folder"]),
        (["tokenizer", "--output", "~nosuchuser/x"], ["output '~nosuchuser/x' begins with a home folder"]),
        (["generator", "--tokenizer", "~nosuchuser/x"], ["tokenizer '~nosuchuser/x' begins with a home folder"]),
        (["generator", "--tokenizer", "empty", "--text-encoder", "~nosuchuser/x"], ["text_encoder '~nosuchuser/x' begins"]),
        (["package", "--generator", "~nosuchuser/x"], ["generator '~nosuchuser/x' begins with a home folder"]),
        (["package", "--drafter", "~nosuchuser/x"], ["drafter '~nosuchuser/x' begins with a home folder"]),
        (["data", "--output", "~nosuchuser/x"], ["output '~nosuchuser/x' begins with a home folder"]),
    ],
)
def test_bad_input(run: Any, words: list[str], said: list[str]) -> None:
    Path("empty").mkdir()
    Path("bad.toml").write_text("batch_sise = 3\n[model]\n")
    result = run("train", *words)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    for part in said:
        assert part in result.stderr, result.stderr
    assert sorted(p.name for p in Path().iterdir()) == ["bad.toml", "empty"]


def test_a_sheet_for_viewers_is_drawn(run: Any, text_model: Any) -> None:
    Path("prompts.txt").write_text("# two\na cat\na dog\n")
    result = run("train", "sheet", "--model", text_model, "--prompts", "prompts.txt", "-o", "sheet.png", "--temperature", 0.8)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"sheet": "sheet.png", "key": "sheet.key.json", "pictures": 2}
    assert sorted(json.loads(Path("sheet.key.json").read_text()).values()) == ["a cat", "a dog"]
    assert Path("sheet.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("verb", ["recall", "sheet"])
def test_a_transformer_that_is_none_is_named(run: Any, text_model: Any, verb: str) -> None:
    Path("empty").mkdir()
    more = ("-o", "sheet.png") if verb == "sheet" else ()
    result = run("train", verb, "--model", text_model, "--transformer", "empty", *more)
    assert result.exit_code != 0 and "transformer must be a run's folder with transformer/" in result.output

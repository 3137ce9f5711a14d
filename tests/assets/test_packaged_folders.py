"""Every packaged folder: its size, its card, and nothing of the machine that made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import vargen.assets
from vargen.assets import packaged_model_path, packaged_models
from vargen.scoring.image_text import packaged_scorers

MEBIBYTES = {"emoji": 40, "emoji-var": 32, "emoji-video": 32, "emoji-scorer": 8}
FOLDER = packaged_model_path("emoji").parent


def card_lines(name: str) -> list[str]:
    """What the card of a folder says of the figures of its runs."""
    if name == "emoji-scorer":
        found: dict[str, Any] = json.loads((FOLDER / name / "metrics.json").read_text())
        drops = [f"| {k} | {v['mean']:+.1f} | {100 * v['share']:.0f} % |" for k, v in found["score_drops"].items()]
        return drops + [f"{100 * share:.0f} %" for share in found["top_1_of_64"].values()]
    found = json.loads((FOLDER / name / "training.json").read_text())
    if name == "emoji":
        loss = found["generator"]["final_held_out_loss"]
        return [f"PSNR {found['tokenizer']['psnr']:.2f} dB", f"loss {loss:.3f}"]
    tokenizer, networks = ("tokenizer", ("model", "small")) if name == "emoji-var" else ("vae", ("target", "drafter"))
    rows = [f"| {each} | {found[each]['step']:.0f} | {found[each]['seconds'] / 3600:.2f} |" for each in networks]
    return [f"PSNR of {found[tokenizer]['psnr']:.2f} dB", *rows]


def test_every_folder_is_tested_and_all_are_small() -> None:
    assert {*packaged_models(), *packaged_scorers()} == set(MEBIBYTES)
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 100 * 2**20


@pytest.mark.parametrize("name", MEBIBYTES)
def test_it_is_small_and_says_nothing_of_the_machine_that_made_it(name: str) -> None:
    files = [file for file in (FOLDER / name).rglob("*") if file.is_file()]
    sizes = [file.stat().st_size for file in files]
    assert (max(sizes) if name == "emoji" else sum(sizes)) <= MEBIBYTES[name] * 2**20
    assert name in ("emoji", "emoji-scorer") or not (FOLDER / name / "text_encoder").exists(), "it borrows that of emoji"
    for file in files:
        assert file.suffix not in (".bin", ".pt", ".pth", ".pkl"), file
        assert file.stat().st_mode & 0o044 == 0o044, f"{file.name} is for its owner alone"
        if file.suffix == ".json" and file.parent.name != "tokenizer":
            assert "_name_or_path" not in file.read_text("utf-8"), file


@pytest.mark.parametrize("name", MEBIBYTES)
def test_the_card_states_the_figures_of_the_runs(name: str) -> None:
    card = (FOLDER / name / "README.md").read_text()
    for line in card_lines(name):
        assert line in card


@pytest.mark.parametrize("name", ["motion.txt", "moving.txt"])
def test_there_are_24_captions_each_with_its_motion(name: str) -> None:
    lines = (Path(vargen.assets.__file__).parent / name).read_text("utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    assert len(rows) == 24 and all(len(row) == 2 and row[1] for row in rows) and len({caption for caption, _ in rows}) == 24

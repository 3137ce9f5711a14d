"""`vargen generate --image --mask --strength`: variations and parts drawn anew, and what is refused before a weight is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def picture(run: Any) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save("cat.png")
    mask = Image.new("L", (8, 8), 0)
    mask.paste(255, (0, 0, 8, 4))
    mask.save("mask.png")
    return Path("cat.png")


def pixels(path: str | Path) -> np.ndarray:
    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB")).astype(int)


def test_strength_says_how_much_is_regenerated(run: Any, scale_model: Path, picture: Path) -> None:
    def drawn(strength: float, name: str) -> np.ndarray:
        words = ("--image", picture, "--strength", strength, "--model", scale_model, "--seed", 5, "-o", name)
        result = run("generate", "a dog", *words)
        assert result.exit_code == 0, result.output
        return pixels(name)

    none = run("generate", "a dog", "--model", scale_model, "--seed", 5, "-o", "plain.png")
    assert none.exit_code == 0
    assert (drawn(1.0, "all.png") == pixels("plain.png")).all(), "all scales drawn anew: the picture is not looked at"
    kept = drawn(0.0, "kept.png")
    assert (kept != pixels("plain.png")).any()
    with Image.open("all.png") as opened:
        said = json.loads(opened.info["vargen"])
    assert said["image"] == "cat.png" and said["strength"] == 1.0


def test_a_mask_is_white_where_it_is_regenerated(run: Any, scale_model: Path, picture: Path) -> None:
    words = ("--image", picture, "--mask", "mask.png", "--model", scale_model, "--json", "-o", "out.png")
    document = json.loads(run("generate", "a dog", "--seed", 5, *words).stdout)
    assert document["mask"] == "mask.png" and document["stats"]["images"] == 1

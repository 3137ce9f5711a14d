"""What race and wall of the demo show is what their prompts and seeds generate, and looks like what they say, to a scorer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("gradio")

from vargen.demo.opening import FOLDER, read_wall
from vargen.image_metadata import pixels_digest
from vargen.pipelines.loading import open_pipeline
from vargen.scoring import open_scorer

LEAST = 8.0  # what a person does not recognize is below it; images of the model's training captions have 10 to 13
MOST_DIFFERENCE = 4.0  # mean over pixels, of 255: the tiles are compressed


@pytest.fixture(scope="module")
def pipe() -> Any:
    return open_pipeline("emoji")  # in 8 bits, as the page


@pytest.mark.slow
def test_both_sides_of_the_race_give_the_image_that_is_saved() -> None:
    pipe = open_pipeline("emoji", quantization=None)  # recorded in float32, as the page says
    race = json.loads((FOLDER / "race.json").read_text("utf-8"))
    with Image.open(FOLDER / "race.png") as opened:
        stored = pixels_digest(opened)
    for lane in race["lanes"]:
        seed = torch.Generator().manual_seed(race["seed"])
        found = pipe(race["prompt"], accelerator=lane["method"], generator=seed)
        assert pixels_digest(found.images[0]) == stored and found.stats.passes == len(lane["tokens"])


@pytest.mark.slow
def test_tiles_of_the_wall_are_generated_again(pipe: Any) -> None:
    tiles = read_wall(("image",))[::3]
    prompts = [tile["prompt"] for tile in tiles]
    scorer = open_scorer("emoji-scorer")
    seeds = [torch.Generator().manual_seed(tile["seed"]) for tile in tiles]
    images = pipe(prompts, accelerator="gumbel", generator=seeds).images
    scores = dict(zip(prompts, scorer.score(images, prompts).tolist(), strict=True))
    assert min(scores.values()) > LEAST, scores
    for tile, image in zip(tiles, images, strict=True):
        with Image.open(FOLDER / tile["file"]) as stored:
            difference = np.abs(np.asarray(stored.convert("RGB"), float) - np.asarray(image.convert("RGB"), float)).mean()
        assert difference < MOST_DIFFERENCE, tile["prompt"]

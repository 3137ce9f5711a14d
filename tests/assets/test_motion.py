"""The captions that tell whether videos move as they are asked to."""

from pathlib import Path

import vargen.assets
from recipes.emoji.dataset import split_of
from recipes.emoji_video.motions import MOTIONS, is_held_out_motion


def test_there_are_24_captions_each_with_its_motion():
    lines = (Path(vargen.assets.__file__).parent / "motion.txt").read_text("utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    assert len(rows) == 24 and all(len(row) == 2 and row[1] for row in rows) and len({caption for caption, _ in rows}) == 24


def test_the_last_four_are_of_concepts_that_training_does_not_see():
    concepts = {"honeybee": "1F41D", "wrestling": "1F93C-200D-2640", "climbing": "1F9D7-200D-2642", "unicorn": "1F984"}
    assert {split_of(code) for code in concepts.values()} == {"validation"}
    seen = {"waving hand": "1F44B", "clapping hands": "1F44F", "butterfly": "1F98B", "fire": "1F525"}
    assert {split_of(code) for code in seen.values()} == {"train"}


def test_twelve_captions_are_stills_in_motions_that_training_never_shows_them_in():
    lines = (Path(vargen.assets.__file__).parent / "moving.txt").read_text("utf-8").splitlines()
    captions = [line.split(" | ")[0] for line in lines if line and not line.startswith("#")]
    assert len(set(captions)) == 24
    concepts = {
        "hamburger": "1F354", "sunflower": "1F33B", "green apple": "1F34F", "octopus": "1F419", "pizza": "1F355",
        "bread": "1F35E", "doughnut": "1F369", "strawberry": "1F353", "rabbit face": "1F430", "lemon": "1F34B",
        "hamster": "1F439", "baby chick": "1F424",
    }  # fmt: skip
    for caption, (noun, code) in zip(captions[:12], concepts.items(), strict=True):
        named = [name for name, motion in MOTIONS.items() if motion.participle in caption]
        assert noun in caption and len(named) == 1 and is_held_out_motion(code, named[0])

"""The captions that tell whether videos move as they are asked to."""

from pathlib import Path

import vargen.assets
from recipes.emoji.dataset import split_of


def test_there_are_24_captions_each_with_its_motion():
    lines = (Path(vargen.assets.__file__).parent / "motion.txt").read_text("utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    assert len(rows) == 24 and all(len(row) == 2 and row[1] for row in rows) and len({caption for caption, _ in rows}) == 24


def test_the_last_four_are_of_concepts_that_training_does_not_see():
    concepts = {"honeybee": "1F41D", "wrestling": "1F93C-200D-2640", "climbing": "1F9D7-200D-2642", "unicorn": "1F984"}
    assert {split_of(code) for code in concepts.values()} == {"validation"}
    seen = {"waving hand": "1F44B", "clapping hands": "1F44F", "butterfly": "1F98B", "fire": "1F525"}
    assert {split_of(code) for code in seen.values()} == {"train"}

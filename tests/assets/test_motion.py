"""The captions that tell whether videos move as they are asked to."""

from pathlib import Path

import pytest

import vargen.assets


@pytest.mark.parametrize("name", ["motion.txt", "moving.txt"])
def test_there_are_24_captions_each_with_its_motion(name: str) -> None:
    lines = (Path(vargen.assets.__file__).parent / name).read_text("utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    assert len(rows) == 24 and all(len(row) == 2 and row[1] for row in rows) and len({caption for caption, _ in rows}) == 24

"""No output of `vargen eval` or `score` takes the place of a file of a run, by whatever name."""

from __future__ import annotations

from pathlib import Path

import pytest

from vargen.cli.outputs import validate_run_outputs

MINE = '{"methods": {}, "subjects": [], "num": 1}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with a reference in it, and links to it from beside it."""
    folder = tmp_path / "run"
    for name in ("images/ar/000", "measurements/x"):
        (folder / name).mkdir(parents=True)
    (folder / "run.json").write_text(MINE)
    (folder / "measurements/x/0.npz").write_text("")
    (tmp_path / "to_run").symlink_to(folder, target_is_directory=True)
    (tmp_path / "link.json").symlink_to(folder / "run.json")
    return folder


NAMES = ["run/run.json", "run/deep/new.json", "to_run/run.json", "link.json", "run/images/../run.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_file_of_the_run_is_refused(name: str, folder: Path) -> None:
    file = folder.parent / name
    with pytest.raises(ValueError, match="run"):
        validate_run_outputs({"json": file}, {}, "", folder)
    for part in (folder, folder / "images" / "ar"):  # scored as a folder of pictures, or compared with
        with pytest.raises(ValueError, match="run"):
            validate_run_outputs({"json": file}, {"reference": part}, "")

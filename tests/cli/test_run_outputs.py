"""No output of `vargen eval` or `score` takes the place of a file of a run, by whatever name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vargen.cli import results
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


def test_what_lies_elsewhere_is_allowed_but_for_what_is_read(folder: Path) -> None:
    beside = folder.parent
    (beside / "prompts.json").write_text("a cat")
    (beside / "pictures").mkdir()
    validate_run_outputs({"json": beside / "out.json", "samples": None}, {"folder": beside / "pictures"}, "", folder)
    with pytest.raises(ValueError, match="would overwrite prompt_file"):
        validate_run_outputs({"json": beside / "prompts.json"}, {"prompt_file": beside / "prompts.json"}, "", folder)


@pytest.mark.parametrize("verb", ["eval", "score"])
def test_the_command_says_so_before_anything_is_written(
    verb: str, run: Any, class_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated = run("eval", "--generate-only", "--model", class_model, "-o", "out", "--num-images", 2, "--threads", 1)
    assert generated.exit_code == 0, generated.stderr
    before = {file: file.read_bytes() for file in Path("out").rglob("*") if file.is_file()}
    monkeypatch.setattr(results, "write_each", lambda writes: pytest.fail("something was written"))
    words = ("eval", "--model", class_model, "-o", "out", "--num-images", 2) if verb == "eval" else ("score", "out")
    for words_of_file in (("--json", "out/run.json"), ("--json", "out/metrics.json")):
        done = run(*words, "--scorers", "none", "--extractor", "none", *words_of_file)
        assert done.exit_code == 2 and "json 'out/" in done.stderr, done.stderr
    assert {file: file.read_bytes() for file in Path("out").rglob("*") if file.is_file()} == before

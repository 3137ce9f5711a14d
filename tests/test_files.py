"""An output folder appears whole or not at all, and what stood there is never lost."""

import os
from pathlib import Path
from typing import Any

import pytest

from vargen.files import whole_files, whole_folder


def _tree(folder: Path) -> dict[str, str | None]:
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def _fill(output: Path, overwrite: bool = False, text: str = "new", inputs: tuple[Path, ...] = ()) -> None:
    before = _tree(output)
    with whole_folder(output, list(inputs), overwrite) as folder:
        (folder / "model_index.json").write_text(text)
        (folder / "part").mkdir()
        assert _tree(output) == before, "nothing shows before the end"


def test_a_new_folder_appears_with_its_parents_at_the_end(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b"
    with whole_folder(output, [], False) as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a").exists()
    assert _tree(tmp_path) == {"a": None, "a/b": None, "a/b/x": "1"}
    mask = os.umask(0)
    os.umask(mask)
    assert output.stat().st_mode & 0o777 == 0o777 & ~mask, "as open as any new folder"


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    _fill(tmp_path / "out")
    assert _tree(tmp_path) == {"out": None, "out/model_index.json": "new", "out/part": None}


def test_a_model_folder_is_replaced_only_where_asked(tmp_path: Path) -> None:
    output = tmp_path / "out"
    _fill(output, text="old")
    (output / "note").write_text("mine")
    before = _tree(tmp_path)
    with pytest.raises(FileExistsError, match="out exists and is not empty"):
        _fill(output)
    assert _tree(tmp_path) == before
    _fill(output, overwrite=True)
    assert _tree(tmp_path) == {"out": None, "out/model_index.json": "new", "out/part": None}


def test_what_is_no_model_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("dear")
    (tmp_path / "file").write_text("x")
    before = _tree(tmp_path)
    for name in ("home", "file"):
        with pytest.raises(FileExistsError, match=f"{name} is not a model folder"):
            _fill(tmp_path / name, overwrite=True)
        with pytest.raises(FileExistsError, match=f"{name} exists and is not empty"):
            _fill(tmp_path / name)
    assert _tree(tmp_path) == before


def test_a_folder_that_holds_an_input_is_not_replaced(tmp_path: Path) -> None:
    _fill(tmp_path / "out")
    (tmp_path / "out" / "x.pt").write_text("weights")
    with pytest.raises(FileExistsError, match="holds what is to be converted"):
        _fill(tmp_path / "out", overwrite=True, inputs=(tmp_path / "other.pt", tmp_path / "out" / "x.pt"))


def test_a_link_keeps_pointing_where_it_did(tmp_path: Path) -> None:
    _fill(tmp_path / "real", text="old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    _fill(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model_index.json").read_text() == "new"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
@pytest.mark.parametrize("old", [True, False])
def test_an_interruption_leaves_what_was_there(error: Any, old: bool, tmp_path: Path) -> None:
    if old:
        _fill(tmp_path / "out", text="old")
    before = _tree(tmp_path)
    with pytest.raises(error), whole_folder(tmp_path / "out", [], True) as folder:
        (folder / "half").write_text("x")
        raise error
    assert _tree(tmp_path) == before


def test_a_failing_last_step_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(tmp_path / "out", text="old")
    before, replace = _tree(tmp_path), os.replace

    def full(source: Path, target: Path) -> None:
        if source.name == "new":
            raise OSError(28, "no space left")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        _fill(tmp_path / "out", overwrite=True)
    assert _tree(tmp_path) == before


def test_where_nothing_can_be_written_the_block_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    places = [tmp_path / "file" / "out"]
    if os.geteuid():  # permissions do not bind the superuser
        places.append(closed / "out")
    for place in places:
        with pytest.raises(OSError, match=r"cannot write .*out"):
            _fill(place)

    def read_only(**_: Any) -> str:
        raise OSError(30, "read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    with pytest.raises(OSError, match=r"cannot write .*out: .*read-only"):
        _fill(tmp_path / "out")
    assert _tree(tmp_path) == {"file": "x", "closed": None}


def test_files_take_their_places_together_or_not_at_all(tmp_path: Path) -> None:
    output = tmp_path / "out"
    for text in ("old", "new"):
        with whole_files(output) as folder:
            (folder / "part").mkdir()
            (folder / "part" / "weights").write_text(text)
            assert not (output / "part").exists() or (output / "part" / "weights").read_text() == "old"
        (output / "mine").write_text("stays")
    for place in (output, tmp_path / "other"):
        with pytest.raises(RuntimeError), whole_files(place) as folder:
            (folder / "mine").write_text("half")
            raise RuntimeError
    assert _tree(tmp_path) == {"out": None, "out/part": None, "out/part/weights": "new", "out/mine": "stays"}

"""An output folder is replaced whole or not at all, and the user's other files in it are kept."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rejects import rejects

from vargen.files import atomic_file, atomic_folder, atomic_merge, validate_not_interrupted


def _tree(folder: Path) -> dict[str, str | None]:
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def _fill(output: Path, overwrite: bool = False, text: str = "new", inputs: tuple[Path, ...] = ()) -> None:
    before = _tree(output)
    with atomic_folder(output, list(inputs), overwrite) as folder:
        (folder / "model_index.json").write_text(text)
        (folder / "part").mkdir()
        assert _tree(output) == before, "nothing is visible before the end"


def test_a_new_folder_appears_with_its_parents_at_the_end(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b"
    with atomic_folder(output, [], False) as folder:
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
    with pytest.raises(FileExistsError):
        _fill(output)
    assert _tree(tmp_path) == before
    _fill(output, overwrite=True)
    assert _tree(tmp_path) == {"out": None, "out/model_index.json": "new", "out/part": None, "out/note": "mine"}


def test_what_is_no_model_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("dear")
    (tmp_path / "file").write_text("x")
    before = _tree(tmp_path)
    for name in ("home", "file"):
        with pytest.raises(FileExistsError):
            _fill(tmp_path / name, overwrite=True)
        with pytest.raises(FileExistsError):
            _fill(tmp_path / name)
    assert _tree(tmp_path) == before


def test_a_folder_that_holds_an_input_is_not_replaced(tmp_path: Path) -> None:
    _fill(tmp_path / "out")
    (tmp_path / "out" / "x.pt").write_text("weights")
    with pytest.raises(FileExistsError):
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
    with pytest.raises(error), atomic_folder(tmp_path / "out", [], True) as folder:
        (folder / "half").write_text("x")
        raise error
    assert _tree(tmp_path) == before


def _write(folder: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


_INDEX = {"_class_name": "LlamaGenPipeline", "id2label": None, "vqvae": ["vargen.models.tokenizers.vq", "VQModel"]}
_OLD = {
    "model_index.json": json.dumps(_INDEX | {part: ["x", "Y"] for part in ("draft_transformer", "text_encoder", "tokenizer")}),
    "draft_transformer/config.json": "old",
    "vqvae/config.json": "old",
    "vqvae/diffusion_pytorch_model.safetensors": "old",
    "vqvae/diffusion_pytorch_model.fp16.safetensors": "old",
    "text_encoder/config.json": "old",
    "text_encoder/model-00001-of-00002.safetensors": "old",
    "text_encoder/model-00002-of-00002.safetensors": "old",
    "text_encoder/model.safetensors.index.json": "old",
    "tokenizer/spiece.model": "old",
    "tokenizer/tokenizer_config.json": "old",
}
_MINE = {
    "c2i_B_256.pt": "the file that was converted",
    "README.md": "mine",
    ".gitattributes": "mine",
    "samples/a.png": "mine",
    "samples/config.json": "mine: no part of the model",
    "text_encoder/notes.txt": "mine",
    "vqvae/before.safetensors": "mine",
    "vqvae/runs/config.json": "mine",
}
_NEW = {
    "model_index.json": json.dumps(_INDEX),
    "vqvae/config.json": "new",
    "vqvae/diffusion_pytorch_model-00001-of-00001.safetensors": "new",
    "transformer/config.json": "new",
}


def _replace(output: Path) -> None:
    with atomic_folder(output, [], True) as folder:
        _write(folder, _NEW)


def _files(folder: Path) -> dict[str, str]:
    return {name: text for name, text in _tree(folder).items() if text is not None}


def test_only_the_files_of_the_model_are_replaced(tmp_path: Path) -> None:
    _write(tmp_path / "out", {**_OLD, **_MINE})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("behind a link")
    (tmp_path / "out" / "transformer").symlink_to(tmp_path / "elsewhere")
    _replace(tmp_path / "out")
    assert _files(tmp_path / "out") == {**_MINE, **_NEW}
    assert not (tmp_path / "out" / "tokenizer").exists(), "a part that the new model lacks"
    assert _files(tmp_path / "elsewhere") == {"config.json": "behind a link"}


@pytest.mark.parametrize("index", ["{", "[]", '{"..": ["a", "b"], "../out/samples": ["a", "b"]}'])
def test_an_index_says_nothing_about_files_outside_its_parts(index: str, tmp_path: Path) -> None:
    _write(tmp_path, {"config.json": "mine", **{f"out/{name}": text for name, text in {**_MINE, **_NEW}.items()}})
    (tmp_path / "out" / "model_index.json").write_text(index)
    _replace(tmp_path / "out")
    assert _files(tmp_path) == {"config.json": "mine", **{f"out/{name}": text for name, text in {**_MINE, **_NEW}.items()}}


@pytest.mark.parametrize("what", ["folder", "files"])
def test_a_rename_that_fails_changes_nothing(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, replace, done = tmp_path / "out", os.replace, []
    _write(output, {**_OLD, **_MINE})
    before = _files(tmp_path)
    for failing in range(100):
        done.clear()

        def full(source: Path, target: Path, failing: int = failing) -> None:
            done.append(source)
            if len(done) == failing + 1:
                raise OSError(28, "no space left")
            replace(source, target)

        monkeypatch.setattr(os, "replace", full)
        try:
            if what == "folder":
                _replace(output)
            else:
                with atomic_merge(output) as folder:
                    _write(folder, _NEW)
        except OSError:
            assert _files(tmp_path) == before
        else:
            break
    assert failing == 2, "one rename of the old folder, one of the new"
    kept = dict(_OLD) if what == "files" else {}
    kept.pop("vqvae/diffusion_pytorch_model.safetensors", None)  # beside shards of its name
    assert _files(output) == {**kept, **_MINE, **_NEW}


# -- processes that are killed ---------------------------------------------------------------------------------------

_KILL_AT_EVERY_MOMENT = """
import json, os, shutil, signal, sys
from pathlib import Path
from vargen import files
how, root, old, new = sys.argv[1], Path(sys.argv[2]), *map(json.loads, sys.argv[3:])
def write(folder, contents):
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
def replace(killed_at):
    count = 0
    def kill(event, _):
        nonlocal count
        if event.split(".")[0] in ("open", "os", "shutil", "tempfile"):
            count += 1
            if count == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(kill)
    if how == "file":
        with files.atomic_file(root / "out" / "file") as temporary:
            temporary.write_text("new")
    else:
        out = root / "out"
        with files.atomic_merge(out) if how == "merge" else files.atomic_folder(out, [], True) as folder:
            write(folder, new)
    os._exit(0)
for moment in range(1, 2000):
    shutil.rmtree(root)
    write(root / "out", old)
    child = os.fork() or replace(moment)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}
    print(json.dumps([code, left]), flush=True)
    if code != -signal.SIGKILL:
        break
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.parametrize("how", ["file", "merge", "folder"])
def test_killed_at_any_moment_one_whole_model_is_left(how: str, tmp_path: Path) -> None:
    """At each system call that Python audits. The model is in its place or, between two renames, in the sibling."""
    few = ("model_index.json", "README.md", "vqvae/config.json", "vqvae/diffusion_pytorch_model.safetensors", "vqvae/runs")
    mine = {name: text for name, text in _MINE.items() if name.startswith(few)}
    old = {"file": "old"} if how == "file" else {name: text for name, text in _OLD.items() if name.startswith(few)} | mine
    replaced = {"file": "new"} if how == "file" else {**mine, **_NEW}
    (tmp_path / "root").mkdir()
    words = [how, str(tmp_path / "root"), json.dumps(old), json.dumps(_NEW)]
    run = subprocess.run([sys.executable, "-c", _KILL_AT_EVERY_MOMENT, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *killed, (code, last) = [json.loads(line) for line in run.stdout.splitlines()]
    assert code == 0 and len(killed) > 10
    assert last == {f"out/{name}": text for name, text in replaced.items()}
    for _, left in killed:
        places = {
            folder: {name.removeprefix(f"{folder}/"): text for name, text in left.items() if name.startswith(f"{folder}/")}
            for folder in ("out", ".out.vargen-previous")
        }
        places = {
            folder: {name: text for name, text in files.items() if not name.startswith(".vargen-")}
            for folder, files in places.items()
        }
        assert places["out"] in (old, replaced) or (places["out"] == {} and places[".out.vargen-previous"] == old)


def test_a_missing_model_that_was_being_replaced_is_reported_and_restored_by_the_next_write(tmp_path: Path) -> None:
    previous = tmp_path / ".out.vargen-previous"
    _write(previous, {**_OLD, **_MINE})
    rejects(lambda: validate_not_interrupted(tmp_path / "out"), "out", FileNotFoundError)
    with pytest.raises(FileExistsError):
        _fill(tmp_path / "out")  # a model is there again, and may not be overwritten
    assert _files(tmp_path / "out") == {**_OLD, **_MINE}
    validate_not_interrupted(tmp_path / "out")
    _write(previous, _OLD)
    rejects(lambda: _replace(tmp_path / "out"), "out", OSError)
    assert _files(previous) == _OLD


def test_what_killed_processes_left_is_removed_after_a_day(tmp_path: Path) -> None:
    _write(tmp_path, {".vargen-a.writing/x": "old", ".vargen-b.writing/x": "new", ".vargen-notes/x": "mine"})
    day_ago = time.time() - 86500
    for path in (tmp_path / ".vargen-a.writing", *tmp_path.glob(".vargen-*/x"), tmp_path / ".vargen-notes"):
        if ".vargen-b" not in str(path):
            os.utime(path, (day_ago, day_ago))
    (tmp_path / ".vargen-c.writing").write_text("mine: a file")
    os.utime(tmp_path / ".vargen-c.writing", (day_ago, day_ago))
    with atomic_file(tmp_path / "out") as temporary:
        temporary.write_text("1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".vargen-b.writing",
        ".vargen-c.writing",
        ".vargen-notes",
        "out",
    ]


def test_many_writers_of_one_folder_do_not_take_each_others_files(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from vargen.files import atomic_file
for number in range(60):
    with atomic_file(Path(sys.argv[1]) / f"{sys.argv[2]}-{number}") as temporary:
        temporary.write_text(sys.argv[2])
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(name)]) for name in range(4)]
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 4
    assert _tree(tmp_path) == {f"{name}-{number}": str(name) for name in range(4) for number in range(60)}


# -- where nothing can be written --------------------------------------------------------------------------------------


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
    rejects(lambda: _fill(tmp_path / "out"), "out", OSError)
    assert _tree(tmp_path) == {"file": "x", "closed": None}


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out" / "part")
    with pytest.raises(OSError, match="current folder"):
        _fill(tmp_path / "out", overwrite=True)


def test_files_take_their_places_together_or_not_at_all(tmp_path: Path) -> None:
    output = tmp_path / "out"
    for text in ("old", "new"):
        with atomic_merge(output) as folder:
            (folder / "part").mkdir()
            (folder / "part" / "weights").write_text(text)
            assert not (output / "part").exists() or (output / "part" / "weights").read_text() == "old"
        (output / "mine").write_text("stays")
    for place in (output, tmp_path / "other"):
        with pytest.raises(RuntimeError), atomic_merge(place) as folder:
            (folder / "mine").write_text("half")
            raise RuntimeError
    assert _tree(tmp_path) == {"out": None, "out/part": None, "out/part/weights": "new", "out/mine": "stays"}


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/somewhere/.vargen-x.writing/new/a"), errno.ENOSPC),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
    ],
)
def test_a_full_disk_has_one_message(tmp_path: Path, error: Exception, number: int) -> None:
    output = tmp_path / "deep" / "out"
    with pytest.raises(OSError, match="out was not written") as caught, atomic_folder(output, [], False) as folder:
        (folder / "half").write_text("half")
        raise error
    assert caught.value.errno == number and ".vargen" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_root_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"^/ "), atomic_folder(Path(tmp_path.anchor), [], False):
        pytest.fail("the root was about to be written")

"""An output folder appears whole or not at all, and what stood there is never lost."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vargen import files
from vargen.files import atomic_file, atomic_folder, atomic_merge


def _tree(folder: Path) -> dict[str, str | None]:
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def _shown(folder: Path) -> dict[str, str | None]:
    """Without what is being written."""
    return {name: text for name, text in _tree(folder).items() if not name.startswith(".vargen-")}


def _fill(output: Path, overwrite: bool = False, text: str = "new", inputs: tuple[Path, ...] = ()) -> None:
    before = _tree(output)
    with atomic_folder(output, list(inputs), overwrite) as folder:
        (folder / "model_index.json").write_text(text)
        (folder / "part").mkdir()
        assert _shown(output) == before, "nothing shows before the end"


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
    with pytest.raises(FileExistsError, match="out exists and is not empty"):
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
def test_a_move_that_fails_puts_everything_back(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert 7 < failing < 99
    kept = dict(_OLD) if what == "files" else {}
    kept.pop("vqvae/diffusion_pytorch_model.safetensors", None)  # beside shards of its name
    assert _files(output) == {**kept, **_MINE, **_NEW}


# -- processes that are killed ---------------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
from pathlib import Path
from vargen import files
how, place = sys.argv[1], Path(sys.argv[2])
writers = {"file": lambda: files.atomic_file(place), "files": lambda: files.atomic_merge(place),
           "folder": lambda: files.atomic_folder(place, [], True)}
with writers[how]() as space:
    (space if how == "file" else space / "weights").write_text("half")
    print("writing", flush=True)
    sys.stdin.read()
"""


def _writer(how: str, place: Path) -> subprocess.Popen:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", _KILLED, how, str(place)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    return process


def _touch(how: str, place: Path) -> None:
    """The next write in the same folder."""
    if how == "file":
        with atomic_file(place.with_name("other")) as temporary:
            temporary.write_text("other")
        place.with_name("other").unlink()
    elif how == "files":
        with atomic_merge(place) as folder:
            (folder / "other").write_text("other")
        (place / "other").unlink()
    else:
        with atomic_folder(place, [], True) as folder:
            (folder / "model_index.json").write_text("{}")


@pytest.mark.parametrize("how", ["file", "files", "folder"])
@pytest.mark.parametrize("old", [False, True])
def test_the_next_write_clears_what_a_killed_process_left(how: str, old: bool, tmp_path: Path) -> None:
    place = tmp_path / "out"
    _write(tmp_path, {".vargen-notes/lock": "mine", ".out.png.1.tmp": "mine", ".vargen-x.writing": "mine: a file"})
    if old and how != "file":
        _write(place, {"model_index.json": "{}", "note": "mine"})
    elif how == "files":
        place.mkdir()
    before = _tree(tmp_path)
    process = _writer(how, place)
    try:
        for path in tmp_path.rglob("*"):
            os.utime(path, (time.time() - 86500,) * 2)  # a long pause is no end
        _touch(how, place)
        assert process.poll() is None and any("weights" in name or name.endswith("new/out") for name in _tree(tmp_path)), (
            "what a live process writes stays"
        )
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    _touch(how, place)
    after = _tree(tmp_path)
    if how == "folder" and not old:
        assert after.pop("out") is None and after.pop("out/model_index.json") == "{}"
    assert after == before


_KILLED_MOVING = """
import os, signal, sys
from pathlib import Path
from vargen import files
output, moves, new = Path(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3])
replace, done = os.replace, 0
def kill(source, target):
    global done
    if done == moves:
        os.kill(os.getpid(), signal.SIGKILL)
    done += 1
    replace(source, target)
with files.atomic_folder(output, [], True) as folder:
    for name, text in new.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    os.replace = kill
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.parametrize("moves", [0, 1, 2, 6, 12, 14, 15])
def test_killed_amid_the_moves_no_mix_is_left_and_the_next_write_goes_on(moves: int, tmp_path: Path) -> None:
    output = tmp_path / "out"
    _write(output, {**_OLD, **_MINE})
    ended = subprocess.run([sys.executable, "-c", _KILLED_MOVING, str(output), str(moves), repr(_NEW)])
    assert ended.returncode == -signal.SIGKILL
    left = _shown(output)
    if "model_index.json" in left:
        assert {name: text for name, text in left.items() if text is not None} == {**_OLD, **_MINE}
    assert all(left[name] == text for name, text in _MINE.items())
    with atomic_file(output / "picture.png") as temporary:
        temporary.write_text("drawn")
    began = moves > 0  # the first move is the plan's
    assert _files(output) == {**(_NEW if began else _OLD), **_MINE, "picture.png": "drawn"}


def test_what_another_machine_writes_stays_for_a_day(tmp_path: Path) -> None:
    process = _writer("file", tmp_path / "out")
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    (space,) = tmp_path.glob(".vargen-*")
    space = space.rename(tmp_path / ".vargen-00000000-12345678.writing")
    for found in (True, False):  # or killed before it had a lock
        if not found:
            (space / "lock").unlink()
        _touch("file", tmp_path / "out")
        assert space.exists()
    for path in [*space.rglob("*"), space]:
        os.utime(path, (time.time() - 86500,) * 2)
    _touch("file", tmp_path / "out")
    assert not space.exists()


_KILLED_ANYWHERE = """
import os, signal, sys
from pathlib import Path
from vargen import files
place = Path(sys.argv[1])
def write(killed_at):
    count = 0
    def kill(event, _):
        nonlocal count
        if event.split(".")[0] in ("open", "os", "fcntl", "shutil", "tempfile"):
            count += 1
            if count == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(kill)
    with files.atomic_file(place) as temporary:
        temporary.write_text("new")
    os._exit(0)
def once(killed_at):
    child = os.fork() or write(killed_at)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
files.atomic_file(place.parent / "x" / "y").__enter__()  # what is imported at first use
for moment in range(1, 1000):
    ended = once(moment)
    print(moment, ended, *sorted(entry.name for entry in place.parent.glob(".vargen-*")), flush=True)
    with files.atomic_file(place.with_name("other")) as temporary:
        temporary.write_text("other")
    left = [entry.name for entry in place.parent.glob(".vargen-*")]
    if left or place.exists() and place.read_text() not in ("old", "new"):
        sys.exit(f"killed at moment {moment}: {left}")
    if ended == 0:
        break
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_killed_at_any_moment_the_next_write_leaves_nothing_of_it(tmp_path: Path) -> None:
    """At each call to the system that Python tells of, from the first to the last, on the way in and out."""
    _write(tmp_path, {"out": "old"})
    told = subprocess.run([sys.executable, "-c", _KILLED_ANYWHERE, str(tmp_path / "out")], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    *killed, whole = [line.split() for line in told.stdout.splitlines()]
    assert whole[1] == "0" and {line[1] for line in killed} == {str(-signal.SIGKILL)} and len(killed) >= 10
    assert sum(len(line) > 2 for line in killed) >= 8, "too few moments at which something was left"
    assert (tmp_path / "out").read_text() == "new"


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
@pytest.mark.parametrize("moment", ["made", "opened"])
def test_a_folder_taken_for_a_killed_ones_before_it_is_locked_is_made_anew(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making the folder and having its lock, another process may take it away."""
    opened, lock, cleared = os.open, files._lock, []

    def clear() -> None:
        if not cleared:
            cleared.append(True)
            files._clear(tmp_path)

    def open_after(*words: Any, **options: Any) -> int:
        if moment == "made" and str(words[0]).endswith("lock"):
            clear()
        return opened(*words, **options)

    def lock_after(file: int, wait: bool) -> bool | None:
        if moment == "opened" and wait:
            clear()
        return lock(file, wait)

    monkeypatch.setattr(os, "open", open_after)
    monkeypatch.setattr(files, "_lock", lock_after)
    with atomic_file(tmp_path / "out") as temporary:
        assert cleared and len(list(tmp_path.glob(".vargen-*"))) == 1
        files._clear(tmp_path)
        temporary.write_text(moment)
    assert _tree(tmp_path) == {"out": moment}


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
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


def test_without_file_locks_age_alone_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_lock", lambda file, wait: None)
    with atomic_file(tmp_path / "a") as temporary:
        temporary.write_text("1")
        _touch("file", tmp_path / "a")
        assert temporary.exists()
    assert _tree(tmp_path) == {"a": "1"}
    space = tmp_path / ".vargen-12345678.writing"
    space.mkdir()
    os.utime(space, (time.time() - 86500,) * 2)
    (space / "lock").touch()
    os.utime(space / "lock", (time.time() - 86500,) * 2)
    os.utime(space, (time.time() - 86500,) * 2)
    _touch("file", tmp_path / "a")
    assert not space.exists()


def test_a_plan_that_cannot_be_undone_is_kept_for_the_next_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, replace, done = tmp_path / "out", os.replace, []
    _write(output, {**_OLD, **_MINE})

    def broken(source: Path, target: Path) -> None:
        done.append(source)
        if len(done) > 5:
            raise OSError(5, "input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="input/output"):
        _replace(output)
    monkeypatch.setattr(os, "replace", replace)
    assert not (output / "model_index.json").exists()
    with atomic_file(output / "picture.png") as temporary:
        temporary.write_text("drawn")
    assert _files(output) == {**_NEW, **_MINE, "picture.png": "drawn"}


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
def test_a_full_disk_is_said_in_one_way(tmp_path: Path, error: Exception, number: int) -> None:
    output = tmp_path / "deep" / "out"
    with (
        pytest.raises(OSError, match=r"out was not written: .*; nothing of it is kept") as caught,
        atomic_folder(output, [], False) as folder,
    ):
        (folder / "half").write_text("half")
        raise error
    assert caught.value.errno == number and ".vargen" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_root_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"^/ "), atomic_folder(Path(tmp_path.anchor), [], False):
        pytest.fail("the root was about to be written")

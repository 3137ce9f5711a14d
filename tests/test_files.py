"""A file and a new folder appear whole or not at all, and a user's other files in a folder are kept."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rejects import rejects

from vargen.files import atomic_folder, atomic_merge


def _tree(folder: Path) -> dict[str, str | None]:
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def _fill(output: Path, text: str = "new") -> None:
    with atomic_folder(output) as folder:
        (folder / "model_index.json").write_text(text)
        (folder / "part").mkdir()
        assert not output.exists() or not any(output.iterdir()), "nothing is visible before the end"


def test_a_new_folder_appears_at_the_end(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b"
    _fill(output)
    assert _tree(tmp_path) == {"a": None, "a/b": None, "a/b/model_index.json": "new", "a/b/part": None}
    mask = os.umask(0)
    os.umask(mask)
    assert output.stat().st_mode & 0o777 == 0o777 & ~mask, "as open as any new folder"


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    _fill(tmp_path / "out")
    assert _tree(tmp_path) == {"out": None, "out/model_index.json": "new", "out/part": None}


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    _fill(tmp_path / "out")
    (tmp_path / "file").write_text("x")
    before = _tree(tmp_path)
    for place in (tmp_path / "out", tmp_path / "file", Path(tmp_path.anchor)):
        rejects(lambda: _fill(place), str(place), FileExistsError)  # noqa: B023
    assert _tree(tmp_path) == before


def test_a_link_keeps_pointing_where_it_did(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    _replace(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and _files(tmp_path / "real") == _NEW


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
@pytest.mark.parametrize("write", [atomic_folder, atomic_merge])
def test_an_interruption_leaves_what_was_there(error: Any, write: Any, tmp_path: Path) -> None:
    output = tmp_path / "out"
    if write is atomic_merge:
        _write(output, _OLD)
    before = _tree(tmp_path)
    with pytest.raises(error), write(output) as folder:
        _write(folder, _NEW)
        raise error
    assert _tree(tmp_path) == before


def _write(folder: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


_OLD = {
    "model_index.json": "old",
    "vqvae/config.json": "old",
    "vqvae/diffusion_pytorch_model.safetensors": "old",
    "vqvae/diffusion_pytorch_model.fp16.safetensors": "old",
    "text_encoder/model.safetensors.index.json": "old",
}
_MINE = {
    "README.md": "mine",
    ".gitattributes": "mine",
    "text_encoder/notes.txt": "mine",
    "vqvae/before.safetensors": "mine",
    "vqvae/runs/config.json": "mine",
}
_NEW = {
    "model_index.json": "new",
    "vqvae/config.json": "new",
    "vqvae/diffusion_pytorch_model-00001-of-00001.safetensors": "new",
    "transformer/config.json": "new",
}
# Weights of a name in one file and in shards are different ones, and libraries differ in which of the two they open.
_MERGED = {**_OLD, **_MINE, **_NEW}
del _MERGED["vqvae/diffusion_pytorch_model.safetensors"]


def _replace(output: Path) -> None:
    with atomic_merge(output) as folder:
        _write(folder, _NEW)


def _files(folder: Path) -> dict[str, str]:
    return {name: text for name, text in _tree(folder).items() if text is not None}


def test_other_files_are_kept(tmp_path: Path) -> None:
    _write(tmp_path / "out", {**_OLD, **_MINE})
    _write(tmp_path / "elsewhere", {"config.json": "mine"})
    (tmp_path / "out" / "transformer").symlink_to(tmp_path / "elsewhere")
    _replace(tmp_path / "out")
    assert _files(tmp_path / "out") == _MERGED and _files(tmp_path / "elsewhere") == {"config.json": "mine"}


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
        with files.atomic_merge(out) if how == "merge" else files.atomic_folder(out) as folder:
            write(folder, new)
    os._exit(0)
for moment in range(1, 2000):
    shutil.rmtree(root)
    root.mkdir()
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
def test_killed_at_any_moment_files_and_new_folders_are_whole(how: str, tmp_path: Path) -> None:
    """At each system call that Python audits."""
    old = {"file": {"file": "old"}, "merge": {**_OLD, **_MINE}, "folder": {}}[how]
    replaced = {"file": {"file": "new"}, "merge": _MERGED, "folder": _NEW}[how]
    (tmp_path / "root").mkdir()
    words = [how, str(tmp_path / "root"), json.dumps(old), json.dumps(_NEW)]
    run = subprocess.run([sys.executable, "-c", _KILL_AT_EVERY_MOMENT, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *killed, (code, last) = [json.loads(line) for line in run.stdout.splitlines()]
    assert code == 0 and len(killed) > 5
    assert last == {f"out/{name}": text for name, text in replaced.items()}
    for _, left in killed:
        found = {name.removeprefix("out/"): text for name, text in left.items() if name.startswith("out/")}
        found = {name: text for name, text in found.items() if not name.startswith(".vargen-")}
        assert how == "merge" or found in (old, replaced)
        assert all(text in (old.get(name), replaced.get(name)) for name, text in found.items()), "no file is written in part"
        assert not set(old) - set(found) - (set(_OLD) - set(_MERGED)), "no file is gone"


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


@pytest.mark.parametrize("write", [atomic_folder, atomic_merge])
def test_where_nothing_can_be_written_the_block_does_not_run(write: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(OSError), write(place):
            pytest.fail("the block ran")
    assert _tree(tmp_path) == {"file": "x"}


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/somewhere/.vargen-x.writing/new/a"), errno.ENOSPC),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
    ],
)
def test_a_full_disk_has_one_message(tmp_path: Path, error: Exception, number: int) -> None:
    output = tmp_path / "deep" / "out"
    with pytest.raises(OSError, match="out was not written") as caught, atomic_folder(output) as folder:
        (folder / "half").write_text("half")
        raise error
    assert caught.value.errno == number and ".vargen" not in str(caught.value)
    assert _tree(tmp_path) == {"deep": None}

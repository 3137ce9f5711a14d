"""`vargen convert`: options reach the converter; what is wrong with a file is said in a line."""

from pathlib import Path
from typing import Any

import pytest
import torch


def test_options_reach_the_converter(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vargen.convert import llamagen

    seen: dict[str, Any] = {}

    def convert(transformer: Path, vq: Path, output: Path, **options: Any) -> Path:
        seen.update(transformer=transformer, vq=vq, **options)
        return output

    monkeypatch.setattr(llamagen, "convert_llamagen", convert)
    words = ("--transformer", "c2i_B_256.pt", "--vq", "vq.pt", "--output", "out/b")
    result = run("convert", "llamagen", *words, "--dtype", "bfloat16", "--overwrite", "--grid-size", 16)
    assert result.exit_code == 0, result.output
    assert result.stdout == "out/b\n"
    assert seen["transformer"] == Path("c2i_B_256.pt") and seen["vq"] == Path("vq.pt")
    assert seen["dtype"] is torch.bfloat16 and seen["overwrite"] and seen["grid_size"] == 16 and seen["n_head"] is None


def test_missing_and_foreign_files(run: Any) -> None:
    result = run("convert", "llamagen", "--transformer", "a.pt", "--vq", "b.pt", "--output", "out")
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and "a.pt" in result.stderr
    Path("a.pt").write_bytes(b"no checkpoint")
    Path("b.pt").write_bytes(b"no checkpoint")
    result = run("convert", "llamagen", "--transformer", "a.pt", "--vq", "b.pt", "--output", "out")
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    assert not Path("out").exists()
    assert run("convert", "llamagen", "--vq", "b.pt").exit_code == 2


@pytest.mark.parametrize("option", ["transformer", "vq", "output", "text-encoder", "tokenizer", "id2label"])
def test_a_home_folder_that_is_not_known(run: Any, option: str) -> None:
    places = {"transformer": "a.pt", "vq": "b.pt", "output": "out", option: "~nosuchuser/x"}
    result = run("convert", "llamagen", *(word for name, place in places.items() for word in (f"--{name}", place)))
    assert result.exit_code == 2
    assert f"{option.replace('-', '_')} '~nosuchuser/x' begins with a home folder that is not known" in result.stderr


GOLDEN = Path(__file__).parents[1] / "golden"
VAR = ("convert", "var", "--transformer", GOLDEN / "var/var.safetensors", "--vae", GOLDEN / "var/vae.safetensors")


def test_the_root_is_no_output(run: Any) -> None:
    result = run(*VAR, "--output", "/")
    assert result.exit_code == 2 and result.stderr.startswith("error: / exists") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("size", [0, 3000, 40_000])
@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_is_one_line_and_leaves_nothing(full_disk: Any, run: Any, size: int, there: bool) -> None:
    before: dict[Path, bytes] = {}
    if there:
        assert run(*VAR, "--output", "out").exit_code == 0
        before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    result = full_disk(size)(*VAR, "--output", "out", "--overwrite")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "out was not written: File too large" in result.stderr
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    assert there or not list(Path().iterdir())


@pytest.mark.parametrize("family", ["var", "llamagen"])
def test_class_names_in_a_folder_are_refused_before_weights_are_read(run: Any, family: str, tmp_path: Path) -> None:
    second = "--vae" if family == "var" else "--vq"
    Path("a.pt").write_bytes(b"no checkpoint")
    words = ("convert", family, "--transformer", "a.pt", second, "a.pt", "--output", "out")
    result = run(*words, "--id2label", tmp_path)
    assert result.exit_code == 2 and f"id2label must be a file, got {str(tmp_path)!r}" in result.stderr
    result = run(*words[:3], tmp_path, *words[4:])
    assert result.exit_code == 2 and f"transformer must be a file, got {str(tmp_path)!r}" in result.stderr
    assert not Path("out").exists()

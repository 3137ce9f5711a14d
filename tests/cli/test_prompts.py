"""Where prompts come from: arguments, files, standard input; and how many may be asked for."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from vargen.cli import inputs as subjects
from vargen.cli.main import app, main

PROMPTS = b"a cat\n\n# no prompt\na dog\n"


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What standard input holds; the runner of commands has one of its own, so the reader's name for it is replaced."""

    def holds(data: bytes) -> None:
        monkeypatch.setattr("vargen.reading.sys", type("sys", (), {"stdin": io.TextIOWrapper(io.BytesIO(data))}))

    return holds


@pytest.mark.parametrize("words", [("-",), ("--prompt-file", "-"), ("a bird", "-"), ("-", "--prompt-file", "more.txt")])
def test_prompts_come_from_standard_input(words: tuple[str, ...], run: Any, text_model: Path, stdin: Any) -> None:
    stdin(PROMPTS)
    Path("more.txt").write_text("a bird\n")
    result = run("generate", *words, "--model", text_model, "--seed", 1, "--threads", 1)
    assert result.exit_code == 0, result.stderr
    kinds = {line.split(".")[0].rsplit("-", 1)[0] for line in result.stdout.split()}
    assert kinds == {"a-cat", "a-dog"} | ({"a-bird"} if len(words) == 3 or "a bird" in words else set())


@pytest.mark.parametrize(
    ("words", "data", "said"),
    [
        (("-", "-"), PROMPTS, "twice"),
        (("-", "--prompt-file", "-"), PROMPTS, "twice"),
        (("-",), b"", "no prompt"),
        (("-",), b"\xff\xfe", "UTF-8"),
        (("--prompt-file", "-"), b"x" * 200, "at most"),
        (("a cat", "-n", "1024", "--prompt-file", "-"), b"a\n" * 50, "the number of images"),
    ],
)
def test_standard_input_that_is_none_is_reported(
    words: tuple[str, ...], data: bytes, said: str, run: Any, stdin: Any, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "_MAX_BYTES", 150)
    monkeypatch.setattr("vargen.cli.generate.MAX_IMAGES", 2000)
    stdin(data)
    result = run("generate", *words, "--model", text_model)
    assert result.exit_code == 2 and said in result.stderr and not list(Path().iterdir()), result.stderr


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="a device of POSIX")
@pytest.mark.parametrize("name", ["/dev/zero", ".", "pipe", "missing"])
def test_what_is_no_file_of_prompts_is_reported_at_once(name: str, run: Any, text_model: Path, class_model: Path) -> None:
    os.mkfifo("pipe")
    for verb in (("eval", "-o", "out", "--prompt-file"), ("generate", "--prompt-file")):
        result = run(*verb, name, "--model", text_model)
        assert result.exit_code == 2 and f"{verb[-1][2:].replace('-', '_')} {name!r}" in result.stderr, result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--num-images", 10**15), ("--num-images", 0), ("--resize", 10**8), ("--resize", 10**30), ("--resize", 1)],
)
def test_numbers_beyond_any_use_are_reported_at_once(
    option: str, value: int, run: Any, class_model: Path, text_model: Path
) -> None:
    for model in (class_model, text_model):
        words = () if model == text_model else ("--classes", "random")
        result = run("eval", "--model", model, "-o", "out", option, value, *words, "--scorers", "none", "--extractor", "none")
        assert result.exit_code == 2 and str(value) in result.stderr
        assert f"{option[2:].replace('-', '_')} must be" in result.stderr
    assert not Path("out").exists()


def test_a_path_with_a_nul_byte_is_reported(run: Any, text_model: Path) -> None:
    for option, name in (("--output", "output"), ("--contact-sheet", "contact_sheet")):
        for value in ("a\0b.png", "a\0b/"):
            result = run("generate", "a cat", "--model", text_model, option, value)
            assert result.exit_code == 2 and f"error: {name} must be" in result.stderr, result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe of POSIX")
def test_images_are_generated_on_when_the_reader_of_their_names_goes(
    run: Any, text_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        words = ["generate", "a cat", "-n", "5", "--batch-size", "1", "--model", str(text_model), "--threads", "1"]
        assert app(words, standalone_mode=False) in (None, 0)
    assert len(list(Path().glob("*.png"))) == 5
    assert capfd.readouterr().err.count("file names are no longer printed") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_names_that_a_full_disk_took_are_a_failure_but_the_images_are_there(
    run: Any, text_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "a cat", "-n", "2", "--batch-size", "1", "--model", str(text_model), "--threads", "1", "-q"]
    monkeypatch.setattr(sys, "argv", ["vargen", *words])
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115 - main takes it over
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and len(list(Path().glob("*.png"))) == 2
    assert len(said.strip().splitlines()) == 1 and "No space left" in said, said

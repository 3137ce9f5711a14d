"""Where prompts come from: arguments, files, standard input; and how many may be asked for."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

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

"""`python app.py` as a newcomer starts it: the packaged model, a browser, a picture; and what it says when it cannot."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vargen.demo.launch import main


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def served(repo_root: Path, chromium: object) -> Iterator[str]:
    """The address of an app with the packaged model, as a process of its own, that Gradio's variables place."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="vargen-app-test-") as folder, tempfile.TemporaryFile("w+") as complaints:
        place = {"GRADIO_SERVER_NAME": "localhost", "GRADIO_SERVER_PORT": str(port)}
        process = subprocess.Popen(
            [sys.executable, "app.py"],
            cwd=repo_root,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env={**os.environ, **place, "TMPDIR": folder},
        )
        try:
            assert process.stdout is not None
            found = next((m for line in process.stdout if (m := re.search(r"runs at (\S+)", line))), None)
            assert found, "the app ended before it served anything"
            assert found[1] == f"http://localhost:{port}/"
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)  # a shell may have its background jobs ignore SIGINT
            process.wait(120)
        assert not [each for each in Path(folder).iterdir() if each.name.startswith("vargen-")], "it leaves nothing behind"
        complaints.seek(0)
        assert "Warning" not in complaints.read(), "a newcomer should have nothing to wonder about"


def test_a_newcomer_generates_an_image(one_browser: Any, served: str) -> None:
    browser = one_browser.open(served)
    browser.says(".vg-head", "emoji")
    browser.write("#prompt textarea, #prompt input", "grinning face")
    browser.click("#style label:has(input[value='3d'])")
    browser.click("#generate")
    browser.says("#note", "Generated in")
    browser.until(lambda: browser.attribute("#stage img", "src").startswith("data:image/png"))
    assert browser.attribute("#stage img", "alt") == "grinning face, 3d style"
    browser.press_tab("Race")
    browser.click("#race")
    browser.says("#race-note", "was first")
    browser.until(lambda: browser.count("#track img[src^='data:image/png']") == 3)
    browser.says("#track", "times as fast as ar")


def test_a_model_that_cannot_be_loaded_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main(["--model", "no-such-model"])
    assert str(ended.value.code).startswith("error: ") and "\n" not in str(ended.value.code)


@pytest.mark.parametrize(
    ("option", "value"), [("--port", "0"), ("--host", ""), ("--concurrency", "0"), ("--threads", "100000")]
)
def test_what_cannot_start_says_why(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option, value])
    assert option.lstrip("-") in capsys.readouterr().err.splitlines()[-1]


def test_a_taken_port_is_reported_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for by, arguments in {"--port": ["--port", port], "GRADIO_SERVER_PORT": []}.items():
            monkeypatch.setenv("GRADIO_SERVER_PORT", port)
            with pytest.raises(SystemExit):
                main(["--model", "no-such-model", *arguments])
            assert f"{by} {port} is used" in capsys.readouterr().err

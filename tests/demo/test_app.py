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
from typer.testing import CliRunner

from vargen.cli.main import app
from vargen.demo import launch


@pytest.fixture(scope="module")
def served(repo_root: Path, chromium: object, free_port: int) -> Iterator[str]:
    """The address of an app with the packaged model, as a process of its own, that Gradio's variables place."""
    with tempfile.TemporaryDirectory(prefix="vargen-app-test-") as folder, tempfile.TemporaryFile("w+") as complaints:
        place = {"GRADIO_SERVER_NAME": "localhost", "GRADIO_SERVER_PORT": str(free_port)}
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
            assert found[1] == f"http://localhost:{free_port}/"
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)  # a shell may have its background jobs ignore SIGINT
            process.wait(120)
        assert not [each for each in Path(folder).iterdir() if each.name.startswith("vargen-")], "it leaves nothing behind"
        complaints.seek(0)
        assert "Warning" not in complaints.read(), "a newcomer should have nothing to wonder about"


def test_a_newcomer_generates_an_image_and_paints_over_a_part(one_browser: Any, served: str) -> None:
    one_browser.prefer("light", motion="no-preference")
    browser = one_browser.open(served)
    browser.says("#head", "emoji")
    browser.write("#prompt textarea, #prompt input", "qwrtz")
    browser.says("#far", "does not know")
    browser.click("#near button, #near td")
    browser.says("#note", "The same image as the slow way")
    browser.write("#prompt textarea, #prompt input", "grinning face")
    browser.until(lambda: not browser.shown("#far"))
    browser.click("#style label:has(input[value='3d'])")
    browser.click("#start")
    browser.says("#note", "grinning face, 3d style: ")
    browser.open(f"{served}?mode=race&prompt=grinning+face,+flat+style&seed=7&method=ar,gumbel")
    browser.says("#race-note", "Fast (gumbel) gave the same image as Slow (ar)")
    browser.says("#track", "times as fast")
    browser.open(f"{served}?mode=edit&prompt=a+red+apple,+3d+style&seed=7")
    browser.says("#edit-note", "seed 7")


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--port", "0", "--port"),
        ("--port", "http", "--port"),
        ("--host", "", "--host"),
        ("--host", "192.0.2.1", "--host"),
        ("--concurrency", "0", "--concurrency"),
        ("--threads", "100000", "threads"),
        ("--model", "no-such-model", "error: unknown model"),
    ],
)
def test_what_cannot_start_says_why(option: str, value: str, named: str) -> None:
    assert named in start(option, value).splitlines()[-1]


def start(*words: str) -> str:
    """What a page that cannot start says."""
    result = CliRunner().invoke(app, ["demo", *words])
    assert result.exit_code == 2
    return result.stderr


def test_a_taken_port_is_reported_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "load_models", lambda *_: pytest.fail("the model was loaded"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for variable, arguments in (("1", ["--port", port]), (port, [])):
            monkeypatch.setenv("GRADIO_SERVER_PORT", variable)
            assert f"--port {port}: " in start(*arguments)

"""`python app.py` as a newcomer starts it: the packaged model, a browser, a picture; and what it says when it cannot."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


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


def test_a_newcomer_draws_a_picture(open_browser: Callable[[str], Any], served: str) -> None:
    browser = open_browser(served)
    browser.says(".vg-head", "emoji")
    browser.write("#prompt textarea, #prompt input", "grinning face")
    browser.click("#style input[value='3d']")
    browser.click("#generate")
    browser.says("#note", "Generated in")
    browser.until(lambda: browser.attribute("#stage img", "src").startswith("data:image/png"))
    assert browser.attribute("#stage img", "alt") == "grinning face, 3d style"
    browser.press_tab("Race")
    browser.click("#race")
    browser.says("#race-note", "was first")
    browser.until(lambda: browser.count("#track img[src^='data:image/png']") == 3)
    browser.says("#track", "times as fast as ar")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "error: "),
        (["--port", "0"], "--port must be from 1 to 65535"),
        (["--host", ""], "--host must be a name or an address of this machine, got ''"),
        (["--concurrency", "0"], "--concurrency must be from 1 to 16"),
        (["--threads", "100000"], "threads must be a whole number from 1 to "),
    ],
)
def test_what_cannot_start_says_why(repo_root: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, "app.py", *arguments], cwd=repo_root, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr


def test_a_taken_port_is_told_before_the_model_is_loaded(repo_root: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        by_option: tuple[list[str], dict[str, str], str] = (["--port", port], {}, "--port")
        by_variable: tuple[list[str], dict[str, str], str] = ([], {"GRADIO_SERVER_PORT": port}, "GRADIO_SERVER_PORT")
        for arguments, variables, name in (by_option, by_variable):
            done = subprocess.run(
                [sys.executable, "app.py", "--model", "no-such-model", *arguments],
                cwd=repo_root,
                env={**os.environ, **variables},
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode != 0 and f"{name} {port} is used" in done.stderr and "server_port" not in done.stderr

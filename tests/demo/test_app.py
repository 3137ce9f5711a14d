"""`python app.py` as a newcomer starts it: the packaged model, a browser, a picture; and what it says when it cannot."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def served(repo_root: Path, chromium: object) -> Iterator[str]:
    """The address of an app with the packaged model, as a process of its own."""
    with tempfile.TemporaryDirectory(prefix="vargen-app-test-") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        process = subprocess.Popen(
            [sys.executable, "app.py"],
            cwd=repo_root,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        try:
            assert process.stdout is not None
            found = next((m for line in process.stdout if (m := re.search(r"draws at (\S+)", line))), None)
            assert found, "the app ended before it served anything"
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)  # a shell may have its background jobs ignore SIGINT
            process.wait(30)
        assert not [each for each in Path(folder).iterdir() if each.name.startswith("vargen-")], "it leaves nothing behind"


def test_a_newcomer_draws_a_picture(open_browser: Callable[[str], Any], served: str) -> None:
    browser = open_browser(served)
    assert "emoji" in browser.text(".vg-head")
    browser.write("#prompt textarea, #prompt input", "grinning face")
    browser.click("#style input[value='3d']")
    browser.click("#generate")
    seen = set()

    def finished() -> bool:
        seen.add(browser.attribute("#stage img", "src"))
        return "Drawn in" in browser.text("#note")

    browser.until(finished, 120)
    assert len(seen) >= 3, "previews and the picture"
    assert browser.attribute("#stage img", "alt") == "grinning face, 3d style"
    browser.press_tab("Race")
    browser.click("#race")
    browser.until(lambda: "was first" in browser.text("#race-note"), 120)
    assert "identical picture to ar" in browser.text("#track")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "error: "),
        (["--port", "0"], "--port must be from 1 to 65535"),
        (["--concurrency", "0"], "--concurrency must be from 1 to 16"),
    ],
)
def test_what_cannot_start_says_why(repo_root: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, "app.py", *arguments], cwd=repo_root, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr

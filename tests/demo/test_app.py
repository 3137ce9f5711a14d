"""`python app.py` as a newcomer starts it: the packaged model, a browser, a picture; and what it says when it cannot."""

from __future__ import annotations

import base64
import io
import json
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

import numpy as np
import pytest
from PIL import Image
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


def test_a_newcomer_generates_an_image(one_browser: Any, served: str) -> None:
    one_browser.prefer("light", motion="no-preference")
    browser = one_browser.open(served)
    browser.says(".vg-head", "emoji")
    browser.write("#prompt textarea, #prompt input", "grinning face")
    browser.click("#style label:has(input[value='3d'])")
    browser.click("#generate")
    browser.says("#note", "Generated in")
    browser.until(lambda: browser.attribute("#stage img", "src").startswith("data:image/png"))
    assert browser.attribute("#stage img", "alt") == "grinning face, 3d style"
    chosen = "return document.querySelector('#style input:checked').value"
    browser.write("#prompt textarea, #prompt input", "grinning face, flat style")
    browser.until(lambda: browser.script(chosen) == "flat")
    browser.click("#style label:has(input[value='3d'])")
    browser.until(
        lambda: browser.value("#prompt textarea, #prompt input") == "grinning face" and browser.script(chosen) == "3d"
    )
    browser.open(f"{served}?prompt=grinning+face,+flat+style&seed=7")
    browser.until(lambda: browser.attribute("#stage img", "alt") == "grinning face, flat style")
    assert browser.script(chosen) == "flat" and browser.value("#prompt textarea, #prompt input") == "grinning face"
    browser.press_tab("Race")
    browser.click("#race")
    browser.says("#race-note", "was first")
    browser.until(lambda: browser.count("#track img[src^='data:image/png']") == 3)
    browser.says("#track", "times as fast as Slow (ar)")


def test_a_newcomer_paints_over_a_half_and_the_other_half_stays(one_browser: Any, served: str) -> None:
    browser = one_browser.open(f"{served}?mode=live&prompt=a+red+apple,+3d+style&seed=7")
    browser.says("#live-note", "Generated in")
    from selenium import webdriver

    before = live_pixels(browser)
    pointer = webdriver.ActionChains(browser.driver)
    canvas = browser.shown("#live-easel canvas")
    browser.script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    across = canvas.size["width"]
    pointer.move_to_element_with_offset(canvas, across // 4, 3 - across // 2).click_and_hold()
    for x, y in ((0, across - 6), (across // 8, 0), (0, 6 - across), (across // 16, across - 6)):
        pointer.move_by_offset(x, y)
    pointer.release().perform()
    browser.says("#live-note", "Painted part generated again")
    browser.write("#prompt textarea, #prompt input", "a green apple, 3d style")
    browser.until(lambda: browser.attribute("#live-stage img", "alt") == "a green apple, 3d style")
    changed = np.abs(live_pixels(browser) - before).mean(2)
    cells = json.loads(browser.script("return window.vargen.brush.read()"))["cells"]
    grid = np.array([cell == "1" for cell in cells]).reshape(8, 8)
    assert grid[:, 6:].all() and not grid[:, :4].any(), "the right of the image was painted"
    kept, repainted = changed[:, :48].mean(), changed[:, 96:].mean()
    assert kept < 8 and repainted > 3 * kept, "the tokenizer alone, which encodes and decodes the image, changes about 4 of 255"


def live_pixels(browser: Any) -> Any:
    browser.until(lambda: browser.attribute("#live-stage img", "src").startswith("data:image/png"))
    content = base64.b64decode(browser.attribute("#live-stage img", "src").split(",")[1])
    with Image.open(io.BytesIO(content)) as opened:
        return np.asarray(opened.convert("RGB")).astype(int)


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
    monkeypatch.setattr(launch, "load_services", lambda *_: pytest.fail("the model was loaded"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for variable, arguments in (("1", ["--port", port]), (port, [])):
            monkeypatch.setenv("GRADIO_SERVER_PORT", variable)
            assert f"--port {port}: " in start(*arguments)

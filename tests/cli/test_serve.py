"""`vargen serve`: bad input is refused before weights are loaded. tests/serving runs the command."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from vargen.pipelines.llamagen import LlamaGenPipeline

pytest.importorskip("fastapi")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "port"),
        (["--slots", "0"], "slots"),
        (["--max-waiting", "0"], "max_waiting"),
        (["--max-images", "0"], "max_images"),
        (["--timeout", "0"], "timeout"),
        (["--timeout", "nan"], "timeout"),
        (["--replicas", "2"], "needs --engine ray"),
        (["--accelerator", "gumbl"], "unknown accelerator"),
        (["--accelerator", "plain"], "plain"),
        (["--guidance-scale", "-1"], "guidance_scale"),
        (["--model", "emoji-video", "--guidance-scale", "2"], "image models"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_options_are_refused_by_name(run: Any, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str) -> None:
    monkeypatch.setattr(LlamaGenPipeline, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    result = run("serve", "--port", "0", *options)
    assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.stderr
    assert not list(Path().iterdir())


def test_an_address_that_cannot_be_used_is_named(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", port)
    assert result.exit_code != 0 and str(port) in result.stderr and "Traceback" not in result.stderr
    result = run("serve", "--host", "192.0.2.1", "--port", "0")  # of no machine
    assert result.exit_code != 0 and "192.0.2.1" in result.stderr and "Traceback" not in result.stderr


def test_a_key_that_no_header_can_hold_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARGEN_API_KEY", "two words")
    result = run("serve")
    assert result.exit_code == 2 and "VARGEN_API_KEY" in result.stderr and "two words" not in result.stderr

"""`vargen serve`: bad input is refused before weights are loaded. tests/serving runs the command."""

from __future__ import annotations

import socket
from typing import Any

import pytest

pytest.importorskip("fastapi")


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

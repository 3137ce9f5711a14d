"""Requests that no page sends: an answer that says what is wrong, no traceback in the log, nothing of the server's insides."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("gradio")

from vargen.demo.malformed_requests import UploadLimit  # noqa: E402

INSIDES = re.compile(r"0x[0-9a-f]{6,}|Traceback|site-packages|/[\w.-]+/[\w.-]+\.py|/(?:tmp|home|root)/|gradio\.|vargen-")


@pytest.fixture
def http(address: str) -> Any:
    with httpx.Client(base_url=address, timeout=30) as client:
        yield client


@pytest.fixture
def quiet(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Checks an answer, and what this process logged meanwhile."""
    monkeypatch.setattr(
        logging.getLogger("vargen"), "handlers", []
    )  # of the command line in other tests, to streams now closed

    def check(answer: str) -> None:
        logged = "".join(capfd.readouterr())
        assert "Traceback" not in logged, logged
        assert not INSIDES.search(answer), answer

    return check


def private(http: Any, number: int, data: Any) -> str:
    """What the page's own protocol says of a call by number."""
    given = {"data": data, "fn_index": number, "session_hash": f"s{number}"}
    begun = http.post("gradio_api/queue/join", json=given)
    if begun.status_code != 200:
        return begun.text
    said = []
    with http.stream("GET", "gradio_api/queue/data", params={"session_hash": f"s{number}"}) as events:
        for line in events.iter_lines():
            said.append(line)
            if "process_completed" in line or "close_stream" in line:
                return "\n".join(said)
    return "\n".join(said)


@pytest.mark.parametrize("path", ["call/nothing", "call/v2/nothing", "run/nothing", "api/nothing"])
def test_an_unknown_endpoint_is_not_found(http: Any, quiet: Any, path: str) -> None:
    answer = http.post(f"gradio_api/{path}", json={"data": ["a red apple"]})
    assert answer.status_code in (400, 404)
    quiet(answer.text)


@pytest.mark.parametrize("number", [-1, 10**6])
@pytest.mark.parametrize("path", ["queue/join", "run/predict"])
def test_an_unknown_number_of_a_function_is_not_found(http: Any, quiet: Any, path: str, number: int) -> None:
    answer = http.post(f"gradio_api/{path}", json={"data": [], "fn_index": number, "session_hash": "s"})
    assert answer.status_code in (400, 404)
    quiet(answer.text)


VALUES = [
    [], [None] * 20, [[]] * 20, [{}] * 20, ["x"] * 20, [10**30] * 20,
    [{"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}] * 20,
    [{"__type__": "update", "value": 3}] * 20,
]  # fmt: skip


def test_malformed_calls_of_the_page_s_own_functions(http: Any, quiet: Any) -> None:
    config = http.get("config").json()
    numbers = [each["id"] for each in config["dependencies"] if each["backend_fn"] and each["api_visibility"] == "private"]
    assert len(numbers) > 15
    for number in numbers:
        for data in VALUES:
            said = private(http, number, json.loads(json.dumps(data)))
            assert said
            quiet(said)


@pytest.mark.parametrize("path", ["/etc/passwd", "pyproject.toml", "../../etc/passwd"])
def test_files_of_the_machine_are_not_served(address: str, repo_root: Path, path: str) -> None:
    place = str(repo_root / path) if path == "pyproject.toml" else path
    answer = httpx.get(f"{address}gradio_api/file={place}")
    assert answer.status_code in (403, 404) and "root:" not in answer.text and "[project]" not in answer.text


def test_uploads_have_a_limit_together(http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def upload() -> int:
        return int(http.post("gradio_api/upload", files={"files": ("a.png", b"x" * 1000)}).status_code)

    assert upload() == 200
    monkeypatch.setattr(UploadLimit, "MAX_BYTES", 100)
    assert upload() == 413

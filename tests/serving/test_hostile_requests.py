"""A thousand requests from a generator, and a thousand silent connections: no server error, nothing of the machine."""

from __future__ import annotations

import http.client
import json
import random
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from served import serving
from waiting import wait_until

from vargen import open_pipeline
from vargen.serving.api import RequestLimits, build_app
from vargen.serving.engine import GenerationThread
from vargen.serving.images import EditBody, ImageBody
from vargen.serving.server import warm_up
from vargen.serving.videos import VideoBody

VALUES: list[Any] = [
    None, -1, 0, 1, 10**12, 10**400, 0.5, -0.0, float("nan"), float("inf"), "", "x", "1", "\ud800", "x" * 5000, True, [], [[]],
    {}, {"a": {}}, "../../etc/passwd", "auto", "b64_json", "8x8",
]  # fmt: skip
PATHS = {ImageBody: "/v1/images/generations", EditBody: "/v1/images/edits", VideoBody: "/v1/videos"}
HEADERS: list[dict[str, str]] = [{}, {}, {"Content-Length": "-1"}, {"Host": "\xe9"}, {"Origin": "null"}, {"X": "y" * 9000}]


@pytest.fixture(scope="module", params=["text_pipe", "scale_pipe", "video_model"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, GenerationThread]]:
    made: Any = request.getfixturevalue(request.param)
    pipe = open_pipeline(made) if isinstance(made, Path) else made
    limits = RequestLimits(images=2, seconds=20, blocks=2, connections_per_address=2000)
    with ExitStack() as running:
        generation = running.enter_context(GenerationThread(pipe, slots=2, max_waiting=100))
        app = build_app(warm_up(pipe, generation, "tiny"), generation, limits)
        yield running.enter_context(serving(app, limits)).removeprefix("http://"), generation


def make_body(choose: random.Random) -> tuple[str, bytes, str]:
    """Path, content and type of a request, most of whose fields are valid names with odd values."""
    kind = choose.choice(list(PATHS))
    names = [*kind.model_fields, "guidance", "__class__", ""]
    odd = {choose.choice(names): choose.choice(VALUES) for _ in range(choose.randrange(3))}
    fields, shape = {"prompt": "1", **odd}, choose.choice(["json", "json", "form", "cut", "list", "text"])
    content = json.dumps([fields] if shape == "list" else fields).encode()
    if shape == "form":
        parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
        content = "".join([*parts, "--b--\r\n"]).encode("utf-8", "replace")
    types = {"form": "multipart/form-data; boundary=b", "text": "text/plain"}
    return PATHS[kind], content[: -len(content) // 3] if shape == "cut" else content, types.get(shape, "application/json")


def test_odd_requests_end_without_a_server_error(served: tuple[str, GenerationThread]) -> None:
    (address, generation), choose, statuses = served, random.Random(0), list[int]()
    for _ in range(334):
        path, content, kind = make_body(choose)
        connection, headers = http.client.HTTPConnection(address, timeout=60), {"Content-Type": kind, **choose.choice(HEADERS)}
        try:
            connection.request(choose.choice(["POST"] * 6 + ["PUT"]), path, content, headers)
            answer = connection.getresponse()
            body = answer.read().decode("utf-8", "replace")
        except (http.client.HTTPException, OSError):  # the server closed a connection that is no HTTP
            continue
        finally:
            connection.close()
        statuses.append(answer.status)
        assert answer.status < 500 and "Traceback" not in body and str(Path.home()) not in body, (path, content, body)
        assert answer.status < 300 or json.loads(body)["error"]["message"]
    wait_until(lambda: generation.stats.num_waiting + generation.stats.num_active == 0)
    assert {200, 400} <= set(statuses) and len(statuses) > 200


def test_silent_connections_harm_nobody(served: tuple[str, GenerationThread]) -> None:
    host, _, port = served[0].partition(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with ExitStack() as held:
        for number in range(1100):
            held.enter_context(socket.create_connection((host, int(port)), 20, (f"127.0.0.{2 + number % 200}", 0)))
        assert ask_health(served[0]) in (200, 503)
    wait_until(lambda: ask_health(served[0]) == 200)


def ask_health(address: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    return status

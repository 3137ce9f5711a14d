"""No client takes the service down: headers without an end, silent and slow connections, and too many of them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from fastapi import FastAPI
from served import serving

from vargen.serving.api import RequestLimits, add_error_handlers

SECONDS = 0.5


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a small application, of which one address may hold three of eight connections."""
    app = FastAPI()
    add_error_handlers(app)
    app.get("/health")(lambda: {"status": "ok"})
    limits = RequestLimits(connections=4, connections_per_address=3, header_seconds=SECONDS)
    with serving(app, limits) as address:
        yield int(address.rpartition(":")[2])


def connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0))


def read_answer(client: socket.socket) -> tuple[int, dict]:
    """Status and body of an answer after which the connection is closed."""
    answer = b""
    while part := client.recv(65536):
        answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def assert_refused(client: socket.socket, status: int) -> None:
    found, body = read_answer(client)
    assert found == status and body["error"].keys() == {"message", "type", "param", "code"}


def assert_answers(port: int) -> None:
    """The service answers a client of another address."""
    with connect(port, "127.0.0.9") as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_answer(client) == (200, {"status": "ok"})


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nX: ", b"GET /", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 9000])
def test_a_header_without_an_end_is_refused_soon(port: int, start: bytes) -> None:
    with connect(port) as client:
        client.sendall(start[: 15 * 1024])
        sent = len(start[: 15 * 1024])
        try:
            while sent < 2**22:
                sent += client.send(b"a" * 1024)
        except OSError:  # closed while we send: an answer may be lost then
            assert sent < 2**22
            return
        assert_refused(client, 431)
    assert_answers(port)


def test_what_is_not_http_is_refused_in_the_same_shape(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"\x00\x01\x02 nothing\r\n\r\n")
        assert_refused(client, 400)


@pytest.mark.parametrize("piece", [b"", b"GET /health HTTP/1.1\r\n"])
def test_a_slow_header_is_ended(port: int, piece: bytes) -> None:
    """Also one that arrives byte by byte, and the header of a second request on a connection."""
    with connect(port) as client:
        client.sendall(piece)
        assert_refused(client, 408)
    with connect(port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in client.recv(65536)
        client.sendall(b"GET")
        started = time.monotonic()
        try:
            while time.monotonic() < started + 20:
                client.sendall(b"a")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() < started + 10


def test_an_idle_connection_between_requests_stays(port: int) -> None:
    with connect(port) as client:
        for _ in range(2):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while b"ok" not in answer:  # the head and the body may come apart
                answer += client.recv(65536)
            assert b" 200 " in answer
            time.sleep(2 * SECONDS)


def test_one_address_holds_only_its_share_of_connections(port: int) -> None:
    with ExitStack() as held:
        clients = [held.enter_context(connect(port)) for _ in range(3)]
        time.sleep(0.1)
        with connect(port) as client:
            assert_refused(client, 503)
        assert_answers(port)
        for client in clients:  # they are released in time
            assert_refused(client, 408)
    with connect(port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_answer(client)[0] == 200


def test_all_addresses_together_hold_a_bounded_number(port: int) -> None:
    with ExitStack() as held:
        for number in range(8):
            held.enter_context(connect(port, f"127.0.0.{10 + number}"))
        time.sleep(0.1)
        with connect(port, "127.0.0.30") as client:
            assert_refused(client, 503)

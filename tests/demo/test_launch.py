"""Which address the options and Gradio's variables mean, and what is said of one that cannot be served at."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest
from rejects import rejects

from vargen.demo.launch import Address, resolve_address, serve

NAMED = {"GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_SERVER_PORT": "8123"}


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which another program serves."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_options_go_before_variables_and_variables_before_defaults() -> None:
    assert resolve_address(None, None, {}) == Address("127.0.0.1", None)
    assert resolve_address(None, None, {"GRADIO_SERVER_NAME": "", "GRADIO_SERVER_PORT": ""}) == Address("127.0.0.1", None)
    assert resolve_address(None, None, NAMED) == Address("0.0.0.0", 8123, *NAMED)
    assert resolve_address("localhost", 9000, {**NAMED, "GRADIO_SERVER_PORT": "nonsense"}) == Address("localhost", 9000)
    assert resolve_address("localhost", None, NAMED) == Address("localhost", 8123, "--host", "GRADIO_SERVER_PORT")


@pytest.mark.parametrize(
    ("host", "port", "environ", "message"),
    [
        (None, 0, {}, "--port must be from 1 to 65535, got 0"),
        (None, 65536, NAMED, "--port must be from 1 to 65535, got 65536"),
        (None, None, {"GRADIO_SERVER_PORT": "http"}, "GRADIO_SERVER_PORT must be from 1 to 65535, got http"),
        (None, None, {"GRADIO_SERVER_PORT": "-1"}, "GRADIO_SERVER_PORT must be from 1 to 65535, got -1"),
        ("", None, NAMED, "--host must be a name or an address of this machine, got ''"),
    ],
)
def test_what_is_no_address_is_reported(host: str | None, port: int | None, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_address(host, port, environ)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_reported_by_the_name_that_the_user_knows(taken: int, host: str) -> None:
    with pytest.raises(OSError, match=f"--port {taken} is used"):
        resolve_address(host, taken, {}).check()
    with pytest.raises(OSError, match=f"GRADIO_SERVER_PORT {taken} is used"):
        resolve_address(host, None, {"GRADIO_SERVER_PORT": str(taken)}).check()


def test_a_port_that_is_taken_after_the_check_is_reported_too(taken: int) -> None:
    gradio = pytest.importorskip("gradio")
    with gradio.Blocks() as empty:
        pass
    with pytest.raises(OSError, match=f"--port {taken} is used"):
        serve(empty, Address("127.0.0.1", taken))


def test_an_address_of_another_machine_is_reported() -> None:
    rejects(resolve_address("192.0.2.1", None, {}).check, "192.0.2.1", OSError)
    rejects(resolve_address(None, None, {"GRADIO_SERVER_NAME": "no such host"}).check, "GRADIO_SERVER_NAME", OSError)


def test_a_free_address_is_fine(taken: int) -> None:
    resolve_address(None, None, {}).check()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    resolve_address("127.0.0.1", port, {}).check()


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_who_reaches_it(host: str, local: bool) -> None:
    assert Address(host, None).local is local

"""The address of the page: options and Gradio's variables, checked before anything is loaded."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

HOST_VARIABLE, PORT_VARIABLE = "GRADIO_SERVER_NAME", "GRADIO_SERVER_PORT"
_FREE = "the first free one from 7860"


@dataclass(frozen=True)
class Address:
    """A host and a port, and the source of each.

    Attributes:
        host: a name or an address of this machine.
        port: None for the first free one.
        host_from, port_from: the option or variable to name in an error.
    """

    host: str
    port: int | None
    host_from: str = "--host"
    port_from: str = "--port"

    @property
    def local(self) -> bool:
        """Whether the address is reachable only from this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check(self) -> None:
        """Raise OSError, with the option and its value, unless the server can bind to this address."""
        try:
            found = socket.getaddrinfo(self.host, self.port or 0, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, place in found:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: closed sockets may linger
                    probe.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OSError(self.taken) from error
            if error.errno == errno.EACCES:
                raise OSError(f"{self.port_from} {self.port} is not open to this user; give one from 1024 to 65535") from error
            message = f"{self.host_from} must be a name or an address of this machine, got {self.host!r}"
            raise OSError(f"{message} ({error.strerror or error})") from error

    @property
    def taken(self) -> str:
        """The message for an address that another program uses."""
        if self.port is None:
            return f"--port is not given, and none of those that are tried, {_FREE}, is free; name one"
        return f"{self.port_from} {self.port} is taken by another program; give another one, or none for {_FREE}"


def chosen(host: str | None, port: int | None, environ: Mapping[str, str]) -> Address:
    """Return the address from the options, else from Gradio's variables, else this machine's own.

    Raises:
        ValueError: for an empty host or an invalid port, with the option or variable and its value.
    """
    host_from, port_from = "--host", "--port"
    given: str | int | None = port
    if host is None and environ.get(HOST_VARIABLE):
        host, host_from = environ[HOST_VARIABLE], HOST_VARIABLE
    if given is None and environ.get(PORT_VARIABLE):
        given, port_from = environ[PORT_VARIABLE], PORT_VARIABLE
    if host is not None and not host.strip():
        raise ValueError(f"{host_from} must be a name or an address of this machine, got {host!r}")
    if given is not None and not (str(given).strip().isdecimal() and 1 <= int(given) <= 65535):
        raise ValueError(f"{port_from} must be from 1 to 65535, got {given}")
    return Address(host or "127.0.0.1", None if given is None else int(given), host_from, port_from)

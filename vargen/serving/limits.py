"""Limits of what one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from vargen.values import number_field, validate_fields


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request; a larger one is refused before anything is generated.

    Attributes:
        body_bytes: of the body. Also limits the memory of requests that are being read.
        prompt_characters: of the prompt.
        images: number of images `n`.
        seconds: from the first byte of the body to the last one of the answer.
        blocks: length of a video in blocks.
        connections: number of requests at a time, beyond which new ones are refused; twice as many connections may be open.
        connections_per_address: number of open connections of one address, such as that of a proxy.
        header_seconds: from the start of a connection, or the first byte of a further request, to the end of its header.
    """

    body_bytes: int = number_field(64 * 1024, 1024, 2**30, is_integer=True)
    prompt_characters: int = number_field(4000, 1, 10**6, is_integer=True)
    images: int = number_field(10, 1, 1024, is_integer=True)
    seconds: float = number_field(120.0, 0, 86400, open_below=True)
    blocks: int = number_field(64, 1, 100_000, is_integer=True)
    connections: int = number_field(512, 1, 10**6, is_integer=True)
    connections_per_address: int = number_field(256, 1, 10**6, is_integer=True)
    header_seconds: float = number_field(10.0, 0, 86400, open_below=True)

    def __post_init__(self) -> None:
        validate_fields(self)

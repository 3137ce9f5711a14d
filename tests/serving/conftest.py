"""Tiny pipelines that a thread generates with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from served import Gate


@pytest.fixture
def gate(text_pipe: Any) -> Iterator[Gate]:
    made = Gate(text_pipe.transformer)
    yield made
    made.remove()

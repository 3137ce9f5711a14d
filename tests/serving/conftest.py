"""Tiny pipelines that a thread generates with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from served import Gate
from tiny_models import class_pipeline, class_var_pipeline, text_pipeline


@pytest.fixture(scope="session")
def text_pipe() -> Any:
    return text_pipeline()


@pytest.fixture(scope="session")
def class_pipe() -> Any:
    return class_pipeline()


@pytest.fixture(scope="session")
def scale_pipe() -> Any:
    return class_var_pipeline()


@pytest.fixture
def gate(text_pipe: Any) -> Iterator[Gate]:
    made = Gate(text_pipe.transformer)
    yield made
    made.remove()

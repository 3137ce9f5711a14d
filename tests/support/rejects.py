"""What every error for bad input is: it names the argument, in one line of a readable length."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def rejects(call: Callable[[], Any], argument: str, error: type[Exception] | tuple[type[Exception], ...] | None = None) -> None:
    """Check that `call` raises `error`, by default ValueError or TypeError, with a message that names `argument`."""
    with pytest.raises(error or (ValueError, TypeError), match=rf"(?<!\w){re.escape(argument)}(?!\w)") as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400

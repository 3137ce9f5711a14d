"""Single values that a caller gave: read as a number, or quoted in a message. One reading for every setting and count."""

from __future__ import annotations

import math
import numbers
from typing import Any

_LONGEST = 100  # characters of a quoted value


def real(value: Any) -> float | None:
    """A finite real number of Python or NumPy as a float; None for anything else, also True, NaN and 10**400."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole(value: Any, least: int, most: int | None = None) -> int | None:
    """A whole number of Python or NumPy from `least` to `most` as an int; None for anything else, also True and 2.0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    number = int(value)
    return number if number >= least and (most is None or number <= most) else None


def shown(value: Any) -> str:
    """`repr(value)` for a message: cut where it is long, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # Python refuses to print an integer of more than 4300 digits, for one
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."

"""Single values that a caller gave: read as a number, or quoted in a message. One reading for every setting and count."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

_LONGEST = 100  # characters of a quoted value


def parse_float(value: Any) -> float | None:
    """A finite real number of Python or NumPy as a float; None for anything else, also True, NaN and 10**400."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def parse_int(value: Any, least: int, most: int | None = None) -> int | None:
    """A whole number of Python or NumPy from `least` to `most` as an int; None for anything else, also True and 2.0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    number = int(value)
    return number if number >= least and (most is None or number <= most) else None


def short_repr(value: Any) -> str:
    """`repr(value)` for a message: cut where it is long, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # Python refuses to print an integer of more than 4300 digits, for one
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def suggest_names(name: str, names: Iterable[str]) -> str:
    """What to tell someone whose `name` is none of `names`."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names)}"


def resolve_name(argument: str, value: Any, named: Mapping[str, Any]) -> Any:
    """What `named` holds under `value`, or `value` itself if it is callable.

    Raises:
        ValueError: for an unknown name. TypeError: for what is neither a name nor callable.
    """
    if callable(value) and not isinstance(value, type):  # a class would be made, not asked
        return value
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be one of {', '.join(map(repr, named))} or a function, got {short_repr(value)}")
    if value not in named:
        raise ValueError(f"unknown {argument} {short_repr(value)}; {suggest_names(value, named)}")
    return named[value]

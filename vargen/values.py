"""Parsing of single values given by a caller, and quoting them in messages; shared by all settings and counts."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

_LONGEST = 100  # maximum length of a quoted value, in characters


def parse_float(value: Any) -> float | None:
    """Return a finite real number of Python or NumPy as a float; None for anything else, including True, NaN and 10**400."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def parse_int(value: Any, least: int, most: int | None = None) -> int | None:
    """Return a whole number of Python or NumPy from `least` to `most` as an int; None for anything else, even True and 2.0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    number = int(value)
    return number if number >= least and (most is None or number <= most) else None


def short_repr(value: Any) -> str:
    """Return `repr(value)` for a message, truncated if it is long; never raises."""
    try:
        text = repr(value)
    except Exception:  # for example, Python refuses to print an integer of more than 4300 digits
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def suggest_names(name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown `name`: similar names, or those that exist."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names)}"


def resolve_name(argument: str, value: Any, named: Mapping[str, Any]) -> Any:
    """Return the entry of `named` under `value`, or `value` itself if it is callable.

    Raises:
        ValueError: for an unknown name. TypeError: for a value that is neither a name nor callable.
    """
    if callable(value) and not isinstance(value, type):  # calling a class would create an instance
        return value
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be one of {', '.join(map(repr, named))} or a function, got {short_repr(value)}")
    if value not in named:
        raise ValueError(f"unknown {argument} {short_repr(value)}; {suggest_names(value, named)}")
    return named[value]

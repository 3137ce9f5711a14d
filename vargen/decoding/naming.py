"""Names of parts, looked up with an error that suggests the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from vargen.values import shown


def nearest(name: str, names: Iterable[str]) -> str:
    """What to tell someone whose `name` is none of `names`."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names)}"


def lookup(argument: str, value: Any, named: Mapping[str, Any]) -> Any:
    """What `named` holds under `value`, or `value` itself if it is callable.

    Raises:
        ValueError: for an unknown name. TypeError: for what is neither a name nor callable.
    """
    if callable(value) and not isinstance(value, type):  # a class would be made, not asked
        return value
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be one of {', '.join(map(repr, named))} or a function, got {shown(value)}")
    if value not in named:
        raise ValueError(f"unknown {argument} {shown(value)}; {nearest(value, named)}")
    return named[value]

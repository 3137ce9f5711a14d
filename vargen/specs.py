"""What a string names: one of several in a list, `name:key=value,...`, or a part of someone's module, `module:name`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from vargen.values import short_repr


def split_specs(text: str | Sequence[str]) -> list[str]:
    """The parts of a comma-separated list whose parts may have options: `a,b:x=1,y=2,c` is `a`, `b:x=1,y=2` and `c`."""
    found: list[str] = []
    for part in (text if isinstance(text, str) else ",".join(text)).split(","):
        name = part.split("=", 1)[0]
        if found and "=" in part and ":" not in name:
            found[-1] += "," + part
        elif part.strip():
            found.append(part.strip())
    return found


def read_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options of `name:key=value,...`.

    Raises:
        ValueError: for an option without a value, or one given twice.
    """
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or key.strip() in options:
            raise ValueError(f"{short_repr(spec)} must be name:key=value,key=value, each key once; got {short_repr(part)}")
        options[key.strip()] = value.strip()
    return name.strip(), options


def imported(spec: str, what: str) -> Any:
    """What `module:name` names; modules of the current folder are found, too.

    Args:
        what: it is to be, for messages, such as `scorer`.

    Raises:
        ValueError: for what is written otherwise, a module that cannot be imported, for whatever reason, or has no such name.
    """
    module, _, name = spec.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or not name.isidentifier():
        raise ValueError(f"{what} {short_repr(spec)} must be module:name, such as my_module:my_{what}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # someone's module may raise anything
        raise ValueError(f"{what} {short_repr(spec)} could not be imported: {type(error).__name__}: {error}") from error


def of_ones_own(spec: str, what: str) -> Any:
    """As `imported`, of a part that is to be called: nothing of Python itself, such as `os:system`, is imported or called.

    Raises:
        ValueError: for a module of Python itself; and see `imported`.
    """
    if spec.split(":")[0].split(".")[0] in sys.stdlib_module_names:
        raise ValueError(f"{what} {short_repr(spec)} must be of a module of yours, and this one is a part of Python")
    return imported(spec, what)

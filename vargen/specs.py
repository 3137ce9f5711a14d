"""Specifications: lists, `name:key=value,...`, `module:name`, and parts of methods in plain values."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from vargen.values import short_repr


def split_specs(text: str | Sequence[str]) -> list[str]:
    """Split a comma-separated list whose parts may have options: `a,b:x=1,y=2,c` gives `a`, `b:x=1,y=2` and `c`."""
    found: list[str] = []
    for part in (text if isinstance(text, str) else ",".join(text)).split(","):
        name = part.split("=", 1)[0]
        if found and "=" in part and ":" not in name:
            found[-1] += "," + part
        elif part.strip():
            found.append(part.strip())
    return found


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Return the name and options of `name:key=value,...`."""
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or key.strip() in options:
            raise ValueError(f"{short_repr(spec)} must be name:key=value,key=value, each key once; got {short_repr(part)}")
        options[key.strip()] = value.strip()
    return name.strip(), options


def import_object(spec: str, what: str) -> Any:
    """Import the object that `module:name` refers to, also from the current folder.

    Args:
        what: the kind of object for error messages, for example `scorer`.
    """
    module, _, name = spec.partition(":")
    if module.split(".")[0] in sys.stdlib_module_names:  # such as os:system, which a caller would run
        raise ValueError(f"{what} {short_repr(spec)} must be in your own module, and this one is part of Python")
    if not all(part.isidentifier() for part in module.split(".")) or not name.isidentifier():
        raise ValueError(f"{what} {short_repr(spec)} must be module:name, such as my_module:my_{what}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # user modules may raise anything
        raise ValueError(f"{what} {short_repr(spec)} could not be imported: {type(error).__name__}: {error}") from error


def part_name(part: Any) -> str:
    """Return the name of a rule or drafter: that of its function or class."""
    return getattr(part, "__name__", type(part).__name__)


def init_fields(part: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that its constructor takes, as plain values."""
    return {each.name: describe_part(getattr(part, each.name)) for each in fields(part) if each.init}


def describe_part(part: Any) -> Any:
    """Describe `part` completely in plain values: scalars unchanged, dataclasses by class name and fields, functions by name.

    Parts of vargen are named without their module, so that specs stay valid when code moves.
    """
    if part is None or isinstance(part, str | bool | int | float):
        return part
    if isinstance(part, list | tuple):
        return [describe_part(each) for each in part]
    if is_dataclass(part) and not isinstance(part, type):
        return {"name": _qualified_name(type(part)), **init_fields(part)}
    if callable(part) and getattr(part, "__module__", None) and "<" not in getattr(part, "__qualname__", "<"):
        return _qualified_name(part)  # the qualified names of lambdas and local functions contain "<" and identify nothing
    raise ValueError(
        f"cannot say what {short_repr(part)} is: give it as a dataclass of plain values, or as a function of a module"
    )


def _qualified_name(part: Any) -> str:
    return part.__qualname__ if part.__module__.startswith("vargen.") else f"{part.__module__}.{part.__qualname__}"

"""Values given by a caller: numbers, names, and the sampling options of a call.

Does not import torch, so that `vargen --help` is fast.
"""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

MAX_SEED = 2**63 - 1
_LONGEST = 100  # maximum length of a quoted value, in characters
_PYDANTIC = {
    "^(Input|String) should": "must",
    "^Value error, .* is not one of": "must be one of",
    "^Value error, Expected UploadFile.*": "must be a file",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def parse_float(value: Any) -> float | None:
    """Return a finite real number of Python or NumPy as a float; None for anything else, even True."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def parse_int(value: Any, least: int, most: int | None = None) -> int | None:
    """Return a whole number from `least` to `most` as an int; None for anything else, even True and 2.0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    number = int(value)
    return number if number >= least and (most is None or number <= most) else None


def require_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a whole number as `parse_int` does; ValueError for anything else."""
    NumberRange(least, math.inf if most is None else most, is_integer=True).check(name, value)
    return int(value)


def short_repr(value: Any) -> str:
    """Return `repr(value)` for a message, in one line and truncated if it is long; never raises."""
    try:
        text = repr(value)
    except Exception:  # for example, Python refuses to print an integer of more than 4300 digits
        text = f"a {type(value).__name__} that cannot be printed"
    text = " ".join(text.split()) if "\n" in text else text  # tensors and arrays
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def one_line(error: BaseException) -> str:
    """Return the message of another library's error as one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"{text} is missing or not known"
    return text if len(text) <= 300 else f"{text[:296]} ..."


def describe_invalid(found: Mapping[str, Any]) -> str:
    """Return an error of pydantic, one of `errors()`, as "must be at least 0, got -1"."""
    text = found["msg"].partition(", unable")[0].rstrip(".")
    for theirs, own in _PYDANTIC.items():
        text = re.sub(theirs, own, text)
    return f"{text}, got {short_repr(found.get('input'))}"


def suggest_names(name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown `name`: similar names, or those that exist."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names)}"


def resolve_name(argument: str, value: Any, named: Mapping[str, Any]) -> Any:
    """Return the entry of `named` under `value`, or `value` itself if it is callable."""
    if callable(value) and not isinstance(value, type):  # calling a class would create an instance
        return value
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be one of {', '.join(map(repr, named))} or a function, got {short_repr(value)}")
    if value not in named:
        raise ValueError(f"unknown {argument} {short_repr(value)}; {suggest_names(value, named)}")
    return named[value]


@dataclass(frozen=True)
class NumberRange:
    """Allowed values of a number; see `number_field`."""

    least: float
    most: float = math.inf
    open_below: bool = False
    is_integer: bool = False
    optional: bool = False
    meaning: str = ""

    def check(self, name: str, value: Any) -> int | float | None:
        """Return the value as a plain int or float, or None where that is allowed."""
        if value is None and self.optional:
            return None
        number = parse_int(value, math.ceil(self.least)) if self.is_integer else parse_float(value)
        if number is None or not self.least <= number <= self.most or (self.open_below and number == self.least):
            raise ValueError(f"{name}{self.meaning and f', {self.meaning},'} must be {self.allowed}, got {short_repr(value)}")
        return number

    def fits(self, value: Any) -> bool:
        """Whether a value is allowed."""
        try:
            self.check("", value)
        except ValueError:
            return False
        return True

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        least, most = (limit if self.is_integer else f"{limit:g}" for limit in (self.least, self.most))
        bounds = f"above {least} and at most {most}" if self.open_below else f"from {least} to {most}"
        if self.most == math.inf:
            bounds = f"above {least}" if self.open_below else f"of at least {least}"
        return f"a {'whole ' * self.is_integer}number {bounds}{', or None' * self.optional}"


def number_field(default: Any, least: float, most: float = math.inf, **options: Any) -> Any:
    """Return a dataclass field for a number, which `validate_fields` checks.

    Args:
        least, most: bounds.
        **options: of `NumberRange`: `open_below`, whether `least` itself is excluded; `is_integer`; `optional`, whether None is
            allowed; `meaning`, a short description of the field for error messages.
    """
    return field(default=default, metadata={"range": NumberRange(least, most, **options)})


def validate_fields(instance: Any) -> None:
    """Check the bool fields of a dataclass and those of `number_field`, which become plain numbers."""
    for each in fields(instance):
        if each.type in ("bool", bool) and each.init and not isinstance(value := getattr(instance, each.name), bool):
            raise TypeError(f"{each.name} must be True or False, got {short_repr(value)}")
        if "range" in each.metadata:
            value = each.metadata["range"].check(each.name, getattr(instance, each.name))
            object.__setattr__(instance, each.name, value)


@dataclass(frozen=True)
class Option:
    """A sampling option: its allowed values and its description.

    Attributes:
        slider: minimum, maximum and step of a page control; a control that cannot express None uses 0 for it.
    """

    name: str
    help: str
    range: NumberRange
    slider: tuple[float, float, float]

    @property
    def label(self) -> str:
        """The display name: "Top-k" for `top_k`."""
        return self.name.removesuffix("_scale").replace("_", "-").capitalize()


# All sampling options of a call, by name.
OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "guidance_scale",
            help="how closely to follow the prompt; 1 turns guidance off",
            range=NumberRange(0.0, 1000.0),  # far beyond any use; float32 logits still hold it, unlike 1e38
            slider=(0, 20, 0.1),
        ),
        Option(
            "temperature",
            help="randomness of sampling; 0 always takes the most probable token",
            range=NumberRange(0.0),
            slider=(0, 2, 0.05),
        ),
        Option(
            "top_k",
            help="number of most probable tokens kept; 0 keeps all",
            range=NumberRange(0, is_integer=True, optional=True),
            slider=(0, 2**20, 1),
        ),
        Option(
            "top_p",
            help="total probability of the most probable tokens kept; 1 keeps all",
            range=NumberRange(0.0, 1.0, open_below=True),
            slider=(0.01, 1, 0.01),
        ),
        Option(
            "min_p",
            help="probability, relative to the most probable token, below which tokens are dropped; 0 keeps all",
            range=NumberRange(0.0, 1.0),
            slider=(0, 1, 0.01),
        ),
    )
}

"""The sampling options, defined once: validation, command line, demo page and documentation read them from here.

Does not import torch, so that `vargen --help` is fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vargen.values import parse_float, parse_int, short_repr


@dataclass(frozen=True)
class Option:
    """A sampling option: its allowed values and its description.

    Attributes:
        name: of the argument.
        allowed: description of the allowed values in error messages.
        help: short description for users.
        off_value: the value that has no effect.
        minimum, maximum: bounds. exclusive_minimum: whether `minimum` itself is excluded.
        is_integer: whether only whole numbers are allowed. optional: whether None is allowed.
        typical: common range, where a bound is far outside it.
        slider: minimum, maximum and step of a page control; a control that cannot express None uses 0 for it.
    """

    name: str
    allowed: str
    help: str
    off_value: float | None
    minimum: float
    maximum: float = math.inf
    exclusive_minimum: bool = False
    is_integer: bool = False
    optional: bool = False
    typical: str = ""
    slider: tuple[float, float, float] = (0, 1, 0.01)

    @property
    def label(self) -> str:
        """The display name: "Top-k" for `top_k`."""
        return self.name.removesuffix("_scale").replace("_", "-").capitalize()

    def check(self, value: Any) -> Any:
        """Return the value as a plain float or int, or None where that is allowed.

        Raises:
            ValueError: the value is not allowed; the message names the option, the value and what is allowed.
        """
        if value is None and self.optional:
            return None
        number = parse_int(value, int(self.minimum)) if self.is_integer else parse_float(value)
        if number is not None and number > self.maximum and self.typical:
            allowed = f"at most {self.maximum:g} ({self.typical} is typical)"
            raise ValueError(f"{self.name} must be {allowed}, got {short_repr(value)}")
        if number is None or not self.minimum <= number <= self.maximum or (self.exclusive_minimum and number == self.minimum):
            raise ValueError(f"{self.name} must be {self.allowed}, got {short_repr(value)}")
        return number


# All sampling options of a call, by name.
OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "guidance_scale",
            allowed="a finite number of at least 0",
            help="how closely to follow the prompt; 1 turns guidance off",
            off_value=1.0,
            minimum=0.0,
            maximum=1000.0,  # far beyond any use; float32 logits still hold it, unlike 1e38
            typical="1 to 10",
            slider=(0, 20, 0.1),
        ),
        Option(
            "temperature",
            allowed="a finite number of at least 0",
            help="randomness of sampling; 0 always takes the most probable token",
            off_value=1.0,
            minimum=0.0,
            slider=(0, 2, 0.05),
        ),
        Option(
            "top_k",
            allowed="a whole number of at least 1, or None to keep every token",
            help="number of most probable tokens kept",
            off_value=None,
            minimum=1,
            is_integer=True,
            optional=True,
            slider=(0, 2**20, 1),
        ),
        Option(
            "top_p",
            allowed="in (0, 1]",
            help="total probability of the most probable tokens kept; 1 keeps all",
            off_value=1.0,
            minimum=0.0,
            maximum=1.0,
            exclusive_minimum=True,
            slider=(0.01, 1, 0.01),
        ),
    )
}


def options_table() -> str:
    """Return the options as a Markdown table for the documentation."""
    rows = [f"| `{each.name}` | {each.allowed} | {each.help} | {each.off_value} |" for each in OPTIONS.values()]
    return "\n".join(["| option | allowed values | effect | neutral value |", "|---|---|---|---|", *rows])

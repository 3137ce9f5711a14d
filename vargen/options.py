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
        neutral: the value that has no effect.
        least, most: bounds. above: whether `least` itself is excluded.
        whole: whether only whole numbers are allowed. optional: whether None is allowed.
        usual: common range, where a bound is far outside it.
        slider: minimum, maximum and step of a page control; a control that cannot express None uses 0 for it.
    """

    name: str
    allowed: str
    help: str
    neutral: float | None
    least: float
    most: float = math.inf
    above: bool = False
    is_integer: bool = False
    optional: bool = False
    usual: str = ""
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
        number = parse_int(value, int(self.least)) if self.is_integer else parse_float(value)
        if number is not None and number > self.most and self.usual:
            raise ValueError(f"{self.name} must be at most {self.most:g}, got {short_repr(value)}; {self.usual} is usual")
        if number is None or not self.least <= number <= self.most or (self.above and number == self.least):
            raise ValueError(f"{self.name} must be {self.allowed}, got {short_repr(value)}")
        return number


# All sampling options of a call, by name.
OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "guidance_scale",
            allowed="a finite number of at least 0 (1 switches guidance off)",
            help="how closely to follow the prompt; 1 is off",
            neutral=1.0,
            least=0.0,
            most=1000.0,  # far beyond any use; float32 logits still hold it, unlike 1e38
            usual="1 to 10",
            slider=(0, 20, 0.1),
        ),
        Option(
            "temperature",
            allowed="a finite number of at least 0 (0 is greedy)",
            help="randomness of sampling; 0 takes the likeliest token",
            neutral=1.0,
            least=0.0,
            slider=(0, 2, 0.05),
        ),
        Option(
            "top_k",
            allowed="a whole number of at least 1, or None to keep every token",
            help="number of likeliest tokens kept, up to the vocabulary",
            neutral=None,
            least=1,
            is_integer=True,
            optional=True,
            slider=(0, 2**20, 1),
        ),
        Option(
            "top_p",
            allowed="in (0, 1], where 1 keeps every token",
            help="probability kept; 1 keeps all",
            neutral=1.0,
            least=0.0,
            most=1.0,
            above=True,
            slider=(0.01, 1, 0.01),
        ),
    )
}


def options_table() -> str:
    """Return the options as a Markdown table for the documentation."""
    rows = [f"| `{each.name}` | {each.allowed} | {each.help} | {each.neutral} |" for each in OPTIONS.values()]
    return "\n".join(["| option | may be | what it does | changes nothing |", "|---|---|---|---|", *rows])

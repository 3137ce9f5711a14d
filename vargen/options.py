"""The settings of sampling, each said once: checks, the command, the page and the documentation read them here.

Imports no torch, so that `vargen --help` is quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vargen.values import parse_float, parse_int, short_repr


@dataclass(frozen=True)
class Option:
    """A setting of sampling: what it may be and what it does. Checks, command, page and documentation read it here.

    Attributes:
        name: of the argument.
        allowed: what error messages call the values it may have.
        help: what it does, a few words for people.
        neutral: the value that changes nothing.
        least, most: bounds. above: whether `least` itself is out.
        whole: whether only whole numbers are allowed. optional: whether None is.
        usual: values that people give, where a bound lies far beyond them.
        slider: least, most and step of a control on a page; a control that cannot say None says 0.
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
        """For people: "Top-k" for `top_k`."""
        return self.name.removesuffix("_scale").replace("_", "-").capitalize()

    def check(self, value: Any) -> Any:
        """The value as a plain float or int, or None where that is allowed.

        Raises:
            ValueError: for anything else, naming the setting, the value and what is allowed.
        """
        if value is None and self.optional:
            return None
        number = parse_int(value, int(self.least)) if self.is_integer else parse_float(value)
        if number is not None and number > self.most and self.usual:
            raise ValueError(f"{self.name} must be at most {self.most:g}, got {short_repr(value)}; {self.usual} is usual")
        if number is None or not self.least <= number <= self.most or (self.above and number == self.least):
            raise ValueError(f"{self.name} must be {self.allowed}, got {short_repr(value)}")
        return number


# Every setting of a call by name.
OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "guidance_scale",
            allowed="a finite number of at least 0 (1 switches guidance off)",
            help="how closely to follow the prompt; 1 is off",
            neutral=1.0,
            least=0.0,
            most=1000.0,  # far beyond any use; float32 logits hold it, and not 1e38
            usual="1 to 10",
            slider=(0, 20, 0.1),
        ),
        Option(
            "temperature",
            allowed="a finite number of at least 0 (0 is greedy)",
            help="how evenly to draw; 0 takes the likeliest token",
            neutral=1.0,
            least=0.0,
            slider=(0, 2, 0.05),
        ),
        Option(
            "top_k",
            allowed="a whole number of at least 1, or None to keep every token",
            help="likeliest tokens kept, up to the vocabulary",
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
    """The options as a table in Markdown, for the documentation."""
    rows = [f"| `{each.name}` | {each.allowed} | {each.help} | {each.neutral} |" for each in OPTIONS.values()]
    return "\n".join(["| option | may be | what it does | changes nothing |", "|---|---|---|---|", *rows])

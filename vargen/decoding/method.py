"""Common base of the methods of all three paradigms: name, summary, and description as plain values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal

from vargen.values import short_repr

DEFAULT_METHOD = "auto"  # default of pipelines, demo, and command line


@dataclass(frozen=True)
class Method(ABC):
    """A named generation method: an `Accelerator`, a `ScaleSchedule`, or a `VideoMethod`.

    Attributes:
        name: used in statistics and messages.
        summary: one-line description for users.
        source: paper.
        experimental: whether listings place it after the core methods.
        paradigm: of the models that can run it.

    Raises:
        TypeError: if `name` is not a string.
    """

    name: str = "custom"
    summary: str = field(default="", kw_only=True)
    source: str = field(default="", kw_only=True)
    experimental: bool = field(default=False, kw_only=True)
    paradigm: ClassVar[Literal["next-token", "next-scale", "video"]]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):  # used as a key in statistics and reports
            raise TypeError(f"name must be a string, got {short_repr(self.name)}")

    @property
    @abstractmethod
    def kind(self) -> Literal["exact", "relaxed"]:
        """`"exact"` if the output follows the target model's own distribution, otherwise `"relaxed"`."""

    @property
    def sequential_tokens(self) -> bool:
        """Whether it commits the tokens that the sequential baseline selects with the same noise, rounding errors aside."""
        return False

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The parameters of the method by name, for display."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """Everything that determines the output, as plain values. Methods with equal specs generate identical output.

        Raises:
            ValueError: if a part has no name, such as a lambda.
        """


def part_name(part: Any) -> str:
    """Return the name of a rule or drafter: that of its function or class."""
    return getattr(part, "__name__", type(part).__name__)


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


def init_fields(part: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that its constructor takes, as plain values."""
    return {each.name: describe_part(getattr(part, each.name)) for each in fields(part) if each.init}

"""Methods as data: what those of all paradigms have in common, and `Accelerator`, a drafter and an acceptance rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar, Literal

from vargen.decoding.interfaces import AcceptanceRule, Drafter, TokenModel
from vargen.decoding.rules import shared_noise
from vargen.decoding.speculative import Sequential
from vargen.specs import init_fields, part_name
from vargen.values import short_repr

DEFAULT_METHOD = "auto"  # default of pipelines, demo, and command line
NAMING = ("name", "summary", "source", "experimental")  # fields that have no effect on the output


@dataclass(frozen=True)
class Method(ABC):
    """A named generation method: an `Accelerator`, a `ScaleSchedule`, or a `VideoMethod`.

    Attributes:
        name: used in statistics and messages.
        summary: one-line description for users.
        source: paper.
        experimental: whether listings place it after the core methods.
        paradigm: of the models that can run it.
    """

    name: str = "custom"
    summary: str = field(default="", kw_only=True)
    source: str = field(default="", kw_only=True)
    experimental: bool = field(default=False, kw_only=True)
    paradigm: ClassVar[Literal["next-token", "next-scale", "video"]]

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

    def spec(self) -> dict[str, Any]:
        """Everything that determines the output, as plain values. Methods with equal specs generate identical output.

        Raises:
            ValueError: if a part has no name, such as a lambda.
        """
        return {name: value for name, value in init_fields(self).items() if name not in NAMING}


_REQUIREMENT_MESSAGES = {
    "independent-per-pass": "it needs draft tokens that are sampled again in every pass, each with its own uniforms",
    "with-replacement": "it needs siblings that are sampled with replacement, and whose number does not depend on the samples",
}


@dataclass(frozen=True)
class Accelerator(Method):
    """A method for next-token models: a drafter and an acceptance rule.

    Attributes:
        drafter: proposes draft tokens. Default: none are proposed, and each pass commits one token.
        acceptance: the rule that verifies the draft.

    Raises:
        TypeError: if `drafter` is not a drafter or `acceptance` is not a rule.
        ValueError: if the parts are incompatible; says why.
    """

    drafter: Drafter = field(default_factory=Sequential)
    acceptance: AcceptanceRule = shared_noise
    paradigm: ClassVar[Literal["next-token"]] = "next-token"

    def __post_init__(self) -> None:
        rule, drafter = self.acceptance, self.drafter
        if not isinstance(rule, AcceptanceRule):
            raise TypeError(f"acceptance must be a rule, such as shared_noise or GroupedRule(), got {short_repr(rule)}")
        if not isinstance(drafter, Drafter):
            raise TypeError(f"drafter must be a Drafter, such as Jacobi() or Speculative(), got {short_repr(drafter)}")
        parts = f"acceptance {part_name(rule)} cannot be combined with {type(drafter).__name__}"
        if drafter.topology not in rule.topologies:
            raise ValueError(
                f"{parts}: it verifies a {rule.topologies[0]} and would test each sibling against the full target "
                "distribution; shared_noise, recursive_rejection, k_seq and traversal verify trees"
            )
        for requirement in rule.requires:
            needed = requirement != "with-replacement" or drafter.topology == "tree"  # a chain has no siblings
            if needed and requirement not in drafter.provides:
                raise ValueError(f"{parts}: {_REQUIREMENT_MESSAGES[requirement]}")

    @property
    def topology(self) -> str:
        """Shape of the drafts: `"chain"` or `"tree"`."""
        return self.drafter.topology

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        return "exact" if self.acceptance.exact else "relaxed"

    @property
    def sequential_tokens(self) -> bool:
        return self.acceptance.sequential_tokens

    @property
    def settings(self) -> dict[str, Any]:
        """The parameters of the drafter and the rule that are not None, by name; nested dataclasses are given as their repr."""
        found: dict[str, Any] = {}
        for part in (self.drafter, self.acceptance):
            values: dict[str, Any] = init_fields(part) if is_dataclass(part) else {}
            for name, value in values.items():
                found[name] = repr(getattr(part, name)) if isinstance(value, dict) else value
        return {name: value for name, value in found.items() if value is not None}

    def bind(self, model: TokenModel, slots: int = 0) -> tuple[Drafter, AcceptanceRule]:
        """Return the drafter, with buffers for B slots, and the rule for a model.

        Raises:
            ValueError: if this model cannot run the method; says why.
        """
        return self.drafter.bind(model, slots), self.acceptance.bind(model)

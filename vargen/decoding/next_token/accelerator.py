"""A next-token method as data: a drafter and an acceptance rule."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal

from vargen.decoding.interfaces import AcceptanceRule, Drafter, TokenModel
from vargen.decoding.method import Method, describe_part, init_fields, part_name
from vargen.decoding.next_token.acceptance import FunctionRule, shared_noise
from vargen.decoding.speculative import Sequential
from vargen.values import short_repr

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
        super().__post_init__()
        if not isinstance(self.acceptance, AcceptanceRule):
            raise TypeError(
                "acceptance must be a rule, such as shared_noise, exact or GroupedRule(), or a function decorated with "
                f"acceptance_rule, got {short_repr(self.acceptance)}"
            )
        if not isinstance(self.drafter, Drafter):
            hint = ", a class: call it" if isinstance(self.drafter, type) else ""
            raise TypeError(
                f"drafter must be a Drafter, such as Jacobi() or Speculative(), got {short_repr(self.drafter)}{hint}"
            )
        parts = f"acceptance {part_name(self.acceptance)} cannot be combined with {type(self.drafter).__name__}"
        if self.topology not in self.acceptance.topologies:
            raise ValueError(
                f"{parts}: it verifies a {self.acceptance.topologies[0]} and would test each sibling against the full target "
                "distribution; shared_noise, recursive_rejection, k_seq and traversal verify trees"
            )
        for requirement in self.acceptance.requires:
            needed = requirement != "with-replacement" or self.topology == "tree"  # a chain has no siblings
            if needed and requirement not in self.drafter.provides:
                raise ValueError(f"{parts}: {_REQUIREMENT_MESSAGES[requirement]}")

    @property
    def topology(self) -> str:
        """Shape of the drafts: `"chain"` or `"tree"`."""
        return self.drafter.topology

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        """`"exact"` if the output follows the target distribution, otherwise `"relaxed"`."""
        return "exact" if self.acceptance.exact else "relaxed"

    @property
    def sequential_tokens(self) -> bool:
        return self.acceptance.sequential_tokens

    def bind(self, model: TokenModel, slots: int = 0) -> tuple[Drafter, AcceptanceRule]:
        """Return the drafter, with buffers for B slots, and the rule for a model.

        Raises:
            ValueError: if this model cannot run the method; says why.
        """
        fitted = self.fit_preset(*model.grid)
        return fitted.drafter.bind(model, slots), fitted.acceptance.bind(model)

    def fit_preset(self, rows: int, columns: int) -> Accelerator:
        """Return the method with the sizes of its preset limited to a grid: those of its drafts, and the radius of its rule.

        Other sizes than the preset's were asked for: they stay, and `bind` refuses what does not fit.
        """
        from vargen.decoding.presets import PRESETS

        preset = PRESETS.get(self.name.partition(":")[0])
        if not isinstance(preset, Accelerator) or rows * columns < 2:
            return self
        drafter = _limit(self.drafter, preset.drafter, preset.drafter.fit_to_grid(rows * columns))
        acceptance = _limit(self.acceptance, preset.acceptance, preset.acceptance.fit_to_grid(rows, columns))
        return replace(self, drafter=drafter, acceptance=acceptance)

    def fit_to_grid(self, tokens: int, vocab: int | None = None) -> Accelerator:
        """Return the method with its drafts limited to a grid of `tokens` tokens and, if given, to a vocabulary of `vocab`."""
        drafter = self.drafter.fit_to_grid(tokens, vocab)
        return self if drafter is self.drafter else replace(self, drafter=drafter)

    def with_window(self, window: int | str) -> Accelerator:
        """Return the method with another window; see `Drafter.with_window`.

        Raises:
            ValueError: if the window is unknown.
        """
        return replace(self, drafter=self.drafter.with_window(window))

    @property
    def settings(self) -> dict[str, Any]:
        """The parameters of the drafter and the rule that are not None, by name.

        Values are plain, as in `spec`; nested dataclasses are given as their repr.
        """
        parts = [part for part in (self.drafter, self.acceptance) if not isinstance(part, FunctionRule) and is_dataclass(part)]
        said = [(name, value, getattr(part, name)) for part in parts for name, value in init_fields(part).items()]
        return {name: repr(own) if isinstance(value, dict) else value for name, value, own in said if value is not None}

    def spec(self) -> dict[str, Any]:
        """Return the complete method as plain values, for caches and reports.

        Methods with equal specs generate identical output.

        Raises:
            ValueError: if a part cannot be named, such as a lambda.
        """
        return {"drafter": describe_part(self.drafter), "acceptance": describe_part(self.acceptance)}


def _limit(part: Any, preset: Any, limited: Any) -> Any:
    """Return a part with the values in which `limited` differs from the preset's part, unless its own are not the preset's."""
    if limited is preset or type(part) is not type(preset):
        return part
    values = {each.name: getattr(limited, each.name) for each in fields(preset) if each.init}
    changed = {name: value for name, value in values.items() if value != getattr(preset, name)}
    return replace(part, **changed) if all(getattr(part, name) == getattr(preset, name) for name in changed) else part

"""A next-token method as data: a drafter, a topology, and an acceptance rule."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from typing import Any, ClassVar, Literal

from vargen.decoding.method import Method, describe_part, init_fields, part_name
from vargen.decoding.next_token.acceptance import FunctionRule, shared_noise
from vargen.decoding.next_token.protocols import (
    AcceptanceRule,
    BranchingDrafter,
    Drafter,
    OfferingDrafter,
    PricedDrafter,
    SizedDrafter,
    TokenModel,
)
from vargen.values import short_repr

_NEEDS = {
    "fresh": "it needs drafts that are drawn anew in every pass, each with coins of its own",
    "replacement": "it needs siblings that are drawn with replacement, as many whatever is drawn",
}


@dataclass(frozen=True)
class Accelerator(Method):
    """A method for next-token models: a drafter, a topology, and an acceptance rule.

    Attributes:
        drafter: proposes draft tokens; with None, each pass commits one token.
        topology: `"chain"` or `"tree"`, the shape of the draft; None uses that of the drafter.
        acceptance: the rule that verifies the draft.

    Raises:
        TypeError: if `drafter` is not a drafter or `acceptance` is not a rule.
        ValueError: if the parts are incompatible; says why.
    """

    drafter: Drafter | None = None
    acceptance: AcceptanceRule = shared_noise
    topology: Literal["chain", "tree"] | None = None
    paradigm: ClassVar[Literal["next-token"]] = "next-token"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology not in (None, "chain", "tree"):
            raise ValueError(f"topology must be 'chain', 'tree' or None, got {short_repr(self.topology)}")
        if isinstance(self.acceptance, type) or not isinstance(self.acceptance, AcceptanceRule):
            raise TypeError(
                "acceptance must be a rule, such as shared_noise, exact or GroupedRule(), or a function that "
                f"acceptance_rule marks as one, got {self.acceptance!r}"
            )
        if self.drafter is None:
            if self.topology not in (None, "chain"):
                raise ValueError("topology 'tree' needs a drafter that proposes trees; without a drafter nothing is proposed")
            return
        if isinstance(self.drafter, type) or not isinstance(self.drafter, Drafter):
            made = ", a class: call it" if isinstance(self.drafter, type) else ""
            given = short_repr(self.drafter) + made
            raise TypeError(f"drafter must be a drafter, such as Jacobi() or Speculative(), or None, got {given}")
        if self.topology is None:
            object.__setattr__(self, "topology", self.drafter.topology)
        self._check_topology(self.drafter)
        self._check_offers(self.drafter)

    def _check_offers(self, drafter: Drafter) -> None:
        """Raise ValueError unless the drafter samples the way the rule requires."""
        offers = drafter.offers if isinstance(drafter, OfferingDrafter) else ()
        for need in self.acceptance.needs if isinstance(self.acceptance, FunctionRule) else ():
            if need not in offers and (need != "replacement" or self.topology == "tree"):
                parts = f"acceptance {part_name(self.acceptance)} cannot go with this {type(drafter).__name__}"
                raise ValueError(f"{parts}: {_NEEDS[need]}")

    def _check_topology(self, drafter: Drafter) -> None:
        """Raise ValueError unless the drafter proposes this topology and the rule can verify it."""
        who = type(drafter).__name__
        if self.topology == "tree" and drafter.topology == "chain":
            raise ValueError(f"topology 'tree' cannot go with {who}: it draws one token per position, which is a chain")
        if self.topology == "chain" and drafter.topology == "tree":
            raise ValueError(f"topology 'chain' cannot go with {who}: it proposes siblings, which need a tree")
        if self.topology not in self.acceptance.topologies:
            raise ValueError(
                f"acceptance {part_name(self.acceptance)} cannot judge a {self.topology}: it follows one "
                f"{self.acceptance.topologies[0]} of drafts, and siblings would each be tested against the full probabilities; "
                "shared_noise, recursive_rejection, k_seq and traversal judge trees"
            )

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        """`"exact"` if the output follows the target distribution, otherwise `"relaxed"`."""
        return "exact" if self.acceptance.exact else "relaxed"

    def bind(self, model: TokenModel) -> tuple[Drafter[Any] | None, AcceptanceRule]:
        """Return the drafter and the rule for a model.

        Raises:
            ValueError: if this model cannot run the method; says why.
        """
        return self.drafter and self.drafter.bind(model), self.acceptance.bind(model)

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless the drafts fit a grid of `tokens` tokens. Needs no weights."""
        if isinstance(self.drafter, SizedDrafter):
            self.drafter.check_grid(tokens)

    def fitted(self, tokens: int, vocab: int | None = None) -> Accelerator:
        """Return the method with its drafts limited to a grid of `tokens` tokens and, if given, to a vocabulary of `vocab`."""
        drafter: Drafter | None = self.drafter
        if isinstance(drafter, SizedDrafter):
            drafter = drafter.fitted(tokens)
        if vocab is not None and isinstance(drafter, BranchingDrafter):
            drafter = drafter.narrowed(vocab)
        return self if drafter is self.drafter else replace(self, drafter=drafter)

    def resized(self, window: int | str) -> Accelerator:
        """Return the method with another window; see `SizedDrafter.resized`.

        Raises:
            ValueError: if the window is unknown.
        """
        return replace(self, drafter=self.drafter.resized(window)) if isinstance(self.drafter, SizedDrafter) else self

    def drafting_cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Measured seconds to draft `drafts` tokens per image, in addition to the target pass."""
        return self.drafter.cost(model, condition, images, drafts) if isinstance(self.drafter, PricedDrafter) else 0.0

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
        return {"drafter": describe_part(self.drafter), "acceptance": describe_part(self.acceptance), "topology": self.topology}

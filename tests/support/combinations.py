"""Combinations of drafter, shape, sampling, rule, and case: as few as cover each pair of their values that fits together."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product
from typing import Any

from initial_drafts import mixture

from vargen.decoding import (
    Accelerator,
    Drafter,
    DynamicTree,
    Eagle,
    Jacobi,
    JacobiTree,
    LayerSkip,
    Lookup,
    Medusa,
    Recycle,
    Speculative,
    SpeculativeTree,
    k_seq,
    recursive_rejection,
    shared_noise,
    speculative_sampling,
    traversal,
)
from vargen.decoding.next_token.drafters.initial import INITIAL_DRAFTS
from vargen.decoding.next_token.trees.children import CHILD_SAMPLING
from vargen.evaluation.exactness import CASES, Case

INITIAL: dict[str, Any] = {**{name: name for name in INITIAL_DRAFTS}, "mixture": mixture}
SHAPES: dict[str, Any] = {
    "chain of 1": 1,
    "chain of 3": 3,
    "static tree": (-1, 0, 0, 1, 2, 3),
    "dynamic tree": DynamicTree(nodes=5, depth=3, children=2),
}
UNTRAINED: dict[str, Drafter] = {
    "layer-skip": LayerSkip(3),
    "lookup": Lookup(3, max_matches=7),
    "lookup in the image alone": Lookup(3, max_matches=0),
    "recycle": Recycle(3, top_k=2),
    "recycle all": Recycle(3, top_k=9),
}
DRAFTERS = (*(f"jacobi {name}" for name in INITIAL), "draft model", "eagle", "medusa", *UNTRAINED)
SAMPLINGS = ("independent", "maximal", "gumbel", *CHILD_SAMPLING, "of the drafter")
RULES = {rule.__name__: rule for rule in (speculative_sampling, shared_noise, recursive_rejection, traversal, k_seq)}


def make_drafter(name: str, shape: str, sampling: str) -> Drafter | None:
    """None if the parts do not fit together."""
    parts, is_chain = SHAPES[shape], shape.startswith("chain")
    if name in UNTRAINED:
        return UNTRAINED[name] if (shape, sampling) == ("chain of 3", "of the drafter") else None
    if name.startswith("jacobi"):
        if sampling not in ("independent", "maximal", "gumbel") or shape == "dynamic tree":
            return None
        initial = INITIAL[name.removeprefix("jacobi ")]
        return Jacobi(parts + 1, sampling, initial) if is_chain else JacobiTree(parts, sampling, initial)
    if sampling not in CHILD_SAMPLING or (shape, sampling) == ("dynamic tree", "with-replacement"):
        return None
    if name != "draft model":
        return {"eagle": Eagle, "medusa": Medusa}[name](parts, sampling)
    if not is_chain:
        return SpeculativeTree(parts, sampling)
    flags = {"without-replacement": False, "shared-noise": True}
    return Speculative(parts, shared_noise=flags[sampling]) if sampling in flags else None


@dataclass(frozen=True)
class Combination:
    drafter: str
    shape: str
    sampling: str
    rule: str
    case_name: str

    def __str__(self) -> str:
        return ", ".join(getattr(self, field.name) for field in fields(self))

    @property
    def case(self) -> Case:
        return next(case for case in CASES if case.name == self.case_name)

    def method(self) -> Accelerator | None:
        drafter = make_drafter(self.drafter, self.shape, self.sampling)
        try:
            return drafter and Accelerator(drafter=drafter, acceptance=RULES[self.rule])
        except ValueError:  # the rule does not fit the drafter
            return None


def pairs(combination: Combination) -> set[tuple[tuple[str, str], ...]]:
    values = [(field.name, getattr(combination, field.name)) for field in fields(combination)]
    return set(combinations(values, 2))


@cache
def valid_combinations() -> tuple[Combination, ...]:
    parts = product(DRAFTERS, SHAPES, SAMPLINGS, RULES)
    fitting = [part for part in parts if Combination(*part, CASES[0].name).method()]
    return tuple(Combination(*part, case.name) for part in fitting for case in CASES)


def _cover() -> list[Combination]:
    """Greedily: in each turn the combination that adds most pairs, and of equal ones the first."""
    covered = {each: pairs(each) for each in valid_combinations()}
    left = set().union(*covered.values())
    chosen = []
    while left:
        chosen.append(max(covered, key=lambda each: len(covered[each] & left)))
        left -= covered[chosen[-1]]
    return chosen


COMBINATIONS = _cover()

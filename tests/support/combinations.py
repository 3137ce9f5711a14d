"""Combinations of drafter, shape, sampling, rule, and case: as few as cover each pair of their values that fits together."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product
from typing import Any

from initial_drafts import MixtureJacobi

from vargen.decoding import (
    Accelerator,
    Drafter,
    DynamicTree,
    Eagle,
    Jacobi,
    Medusa,
    Speculative,
    shared_noise,
    speculative_sampling,
    traversal,
)
from vargen.decoding.experimental import (
    JacobiTree,
    LayerSkip,
    Lookup,
    Recycle,
    SampledTree,
    SpeculativeTree,
    k_seq,
    recursive_rejection,
)
from vargen.decoding.experimental.eagle_children import SharedNoise, TopK
from vargen.verify.exactness import CASES, Case

SHAPES: dict[str, DynamicTree] = {
    "chain of 1": DynamicTree(1, 1, 1),
    "chain of 3": DynamicTree(3, 3, 1),
    "complete tree": DynamicTree(6, 2, 2),
    "best nodes": DynamicTree(5, 3, 2),
}
UNTRAINED: dict[str, Drafter] = {
    "layer-skip": LayerSkip(3),
    "lookup": Lookup(3),
    "recycle": Recycle(3, top_k=2),
    "recycle all": Recycle(3, top_k=9),
}
CHILDREN: dict[str, dict[str, Any]] = {  # attributes of a `TreeDrafter`
    "without-replacement": {},
    "shared-noise": {"children": SharedNoise(), "provides": ()},
    "top-k": {"children": TopK()},
}
TREES = {"draft model": SpeculativeTree, "eagle": Eagle, "medusa": Medusa}
DRAFTERS = ("jacobi uniform", "jacobi low-res", "jacobi mixture", *TREES, *UNTRAINED)
SAMPLINGS = ("independent", "maximal", "gumbel", *CHILDREN, "with-replacement", "of the drafter")
RULES = {rule.__name__: rule for rule in (speculative_sampling, shared_noise, recursive_rejection, traversal, k_seq)}


def make_drafter(name: str, shape: str, sampling: str) -> Drafter | None:
    """None if the parts do not fit together."""
    tree, is_chain = SHAPES[shape], shape.startswith("chain")
    if name in UNTRAINED:
        return UNTRAINED[name] if (shape, sampling) == ("chain of 3", "of the drafter") else None
    if name.startswith("jacobi"):
        return make_jacobi(name.removeprefix("jacobi "), shape, sampling)
    if (name, shape, sampling) == ("draft model", "complete tree", "with-replacement"):
        return SampledTree(branching=(2, 2))
    if sampling not in CHILDREN:
        return None
    if name == "draft model" and is_chain:
        flags = {"without-replacement": False, "shared-noise": True}
        return Speculative(tree.nodes, shared_noise=flags[sampling]) if sampling in flags else None
    return type(f"{name}, {sampling}", (TREES[name],), CHILDREN[sampling])(tree)


def make_jacobi(initial: str, shape: str, sampling: str) -> Drafter | None:
    """A window, or one with second candidates, which start from uniform draft tokens."""
    if sampling not in ("independent", "maximal", "gumbel"):
        return None
    if shape.startswith("chain"):
        width = SHAPES[shape].nodes + 1
        return MixtureJacobi(width, sampling) if initial == "mixture" else Jacobi(width, sampling, initial)
    return JacobiTree(6, 2, 2, sampling) if (initial, shape) == ("uniform", "complete tree") else None


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

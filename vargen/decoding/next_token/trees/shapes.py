"""Shapes of trees as data: static ones, the same in every pass, and dynamic ones, which grow anew for each image and pass.

A static tree is a tuple of parents, root first: `(-1, 0, 0, 1, 1)` is a root with two children, of which the first has two.
Siblings are ranked by their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vargen.values import parse_float, parse_int, short_repr, suggest_names

MAX_TREE_WIDTH = 256  # tokens of a pass


def chain(drafts: int) -> tuple[int, ...]:
    """So many tokens in a row."""
    return tuple(range(-1, drafts))


def make_k_ary(children: int, depth: int) -> tuple[int, ...]:
    """Every slot above `depth` has so many children."""
    return branching([children] * depth)


def branching(children: Sequence[int]) -> tuple[int, ...]:
    """Every slot at depth d has `children[d]` children (RSD-C of Jeon et al. 2024)."""
    parents, level = [-1], [0]
    for count in children:
        below = range(len(parents), len(parents) + len(level) * count)
        parents += [slot for slot in level for _ in range(count)]
        level = list(below)
    return tuple(parents)


def make_by_level_sizes(widths: Sequence[int]) -> tuple[int, ...]:
    """So many slots at each depth below the root, given to the likeliest parents: those of least rank, summed from the root on.

    That is the best tree of these widths where each younger sibling is less likely than its elder by one and the same factor.
    """
    parents, level = [-1], [(0, 0)]  # of a level: (ranks summed, slot)
    for width in widths:
        candidates = sorted((ranks + rank, slot, rank) for ranks, slot in level for rank in range(width))[:width]
        candidates.sort(key=lambda each: each[1:])  # by parent, then rank
        below = [(ranks, len(parents) + index) for index, (ranks, _, _) in enumerate(candidates)]
        parents += [slot for _, slot, _ in candidates]
        level = below
    return tuple(parents)


def fan(fed: int, children: int, depth: int) -> tuple[int, ...]:
    """Every slot above `depth` has so many children, and below the first of the deepest ones a chain makes up the `fed` slots:
    the tree of SJD-PAC.

    Raises:
        ValueError: if `fed` slots do not hold the part that branches.
    """
    parents = make_k_ary(children, depth)
    if fed < len(parents):
        raise ValueError(f"{children} children to depth {depth} are {len(parents)} slots, the root included, got {fed}")
    first = len(parents) - children**depth  # of the deepest
    return parents + tuple(first if slot == len(parents) else slot - 1 for slot in range(len(parents), fed))


STATIC: dict[str, tuple[int, ...]] = {
    "chain-4": chain(4),
    "binary-3": make_k_ary(2, 3),
    "wide-15": make_by_level_sizes((4, 5, 4, 2)),
    "wide-31": make_by_level_sizes((6, 9, 8, 5, 3)),
    "wide-57": make_by_level_sizes((8, 15, 15, 11, 8)),
    "fan-24": fan(24, 2, 2),
}


def compute_depths(parents: Sequence[int]) -> int:
    """Steps from the root to the deepest slot."""
    steps = [0]
    for parent in parents[1:]:
        steps.append(steps[parent] + 1)
    return max(steps)


def parse_parents(value: Any) -> tuple[int, ...]:
    """A static tree by name or by its parents.

    Raises:
        ValueError: for an unknown name, or parents that do not start with -1 and then name earlier slots, or too many or none.
        TypeError: for what is neither.
    """
    if isinstance(value, str):
        if value not in STATIC:
            raise ValueError(
                f"unknown tree {short_repr(value)}; {suggest_names(value, STATIC)}, or give the parents of its slots"
            )
        return STATIC[value]
    if not isinstance(value, Sequence):
        raise TypeError(f"tree must be a name or a sequence of parents, root first, got {short_repr(value)}")
    parents = tuple(parse_int(parent, -1) for parent in value)
    if not 2 <= len(parents) <= MAX_TREE_WIDTH:
        raise ValueError(f"tree must have from 2 to {MAX_TREE_WIDTH} slots, the root included, got {len(parents)}")
    if parents[0] != -1 or any(parent is None or not 0 <= parent < slot for slot, parent in enumerate(parents[1:], 1)):
        raise ValueError(
            f"tree must have parents that start with -1 and then name earlier slots, got {short_repr(tuple(value))}"
        )
    return tuple(int(parent) for parent in parents if parent is not None)


@dataclass(frozen=True)
class StaticTree:
    """The same tree in every pass.

    Args:
        parents: of the slots, root first, or a name of `STATIC`.

    Raises:
        ValueError, TypeError: see `parse_parents`.
    """

    parents: tuple[int, ...] | str = "wide-15"

    def __post_init__(self) -> None:
        if not isinstance(self.parents, str):
            object.__setattr__(self, "parents", parse_parents(self.parents))
        parse_parents(self.parents)

    @property
    def slots(self) -> tuple[int, ...]:
        """The parents."""
        return parse_parents(self.parents)

    @property
    def nodes(self) -> int:
        """Drafted tokens of a pass."""
        return len(self.slots) - 1

    @property
    def depth(self) -> int:
        return compute_depths(self.slots)

    @property
    def children(self) -> int:
        """Most children of a slot."""
        return max(self.slots.count(slot) for slot in range(len(self.slots)))

    @property
    def expanded(self) -> int:
        """Slots that have children."""
        return sum(self.widths())

    def widths(self) -> list[int]:
        """Slots that have children at each depth, the root's first."""
        steps = [0]
        for parent in self.slots[1:]:
            steps.append(steps[parent] + 1)
        inner = set(self.slots[1:]) - {-1}
        return [sum(steps[slot] == depth for slot in inner) for depth in range(max(steps))]

    def cut(self, depth: int) -> StaticTree:
        """The tree without what lies deeper."""
        steps = [0]
        for parent in self.slots[1:]:
            steps.append(steps[parent] + 1)
        return self._without([step > depth for step in steps])

    def narrowed(self, children: int) -> StaticTree:
        """The tree with at most so many children of a slot, the first ones."""
        return self._without([self.slots[:slot].count(self.slots[slot]) >= children for slot in range(len(self.slots))])

    def _without(self, left_out: Sequence[bool]) -> StaticTree:
        """The tree without these slots and what follows them."""
        kept, parents = {0: 0}, [-1]
        for slot, parent in enumerate(self.slots[1:], 1):
            if parent in kept and not left_out[slot]:
                kept[slot] = len(parents)
                parents.append(kept[parent])
        return StaticTree(tuple(parents))


# How often the first, second, ... sibling is the accepted one.
ACCEPTANCE = (0.6, 0.14, 0.07, 0.04)


@dataclass(frozen=True)
class DynamicTree:
    """A tree that grows anew for each image and pass: level by level, and of all candidates the best `nodes` stay.

    Li et al. 2024, EAGLE-2: each level expands the `frontier` likeliest slots, each to `children` candidates; then the
    likeliest `nodes` of all are kept. Children are never likelier than their parents, and ties go to parents and elder
    siblings, so that what stays hangs together.

    Args:
        nodes: drafted tokens of a pass.
        depth: steps from the root.
        children: most of a slot.
        frontier: slots of a level that are expanded; None: as many as `children`.
        acceptance: for drafts that are drawn, how often the first, second, ... sibling is the accepted one (see
            `DecodeStats.sibling_rates`), each above 0 and less than 1 in sum; ranks beyond these count as the last. It decides
            what is expanded and kept.

    Raises:
        ValueError: for values outside these ranges, or fewer candidates than `nodes`.
    """

    nodes: int = 15
    depth: int = 4
    children: int = 4
    frontier: int | None = None
    acceptance: tuple[float, ...] = field(default=ACCEPTANCE)

    def __post_init__(self) -> None:
        for name, most in (("nodes", MAX_TREE_WIDTH - 1), ("depth", MAX_TREE_WIDTH - 1), ("children", MAX_TREE_WIDTH - 1)):
            value = parse_int(getattr(self, name), 1, most)
            if value is None:
                raise ValueError(
                    f"{name} of a tree must be a whole number from 1 to {most}, got {short_repr(getattr(self, name))}"
                )
            object.__setattr__(self, name, value)
        frontier = self.children if self.frontier is None else parse_int(self.frontier, 1, MAX_TREE_WIDTH - 1)
        if frontier is None:
            raise ValueError(f"frontier must be a whole number from 1 to {MAX_TREE_WIDTH - 1}, got {short_repr(self.frontier)}")
        object.__setattr__(self, "frontier", frontier)
        rates = [parse_float(rate) for rate in self.acceptance] if isinstance(self.acceptance, list | tuple) else []
        if not rates or any(rate is None or not rate > 0 for rate in rates) or sum(rates) >= 1:  # type: ignore[arg-type]
            given = short_repr(self.acceptance)
            raise ValueError(f"acceptance must hold a rate in (0, 1) for each rank, and these less than 1 in sum, got {given}")
        object.__setattr__(self, "acceptance", tuple(rates))
        if self.nodes > self.candidates:
            raise ValueError(
                f"nodes must be at most the {self.candidates} candidates that {self.depth} levels of {frontier} slots with "
                f"{self.children} children have, got {self.nodes}"
            )

    @property
    def chances(self) -> tuple[float, ...]:
        """By rank, how often a sibling is accepted where all before it were refused."""
        found, left = [], 1.0
        for rank in range(self.children):
            rate = self.acceptance[min(rank, len(self.acceptance) - 1)]
            found.append(min(rate / left, 0.99))
            left = max(left - rate, 0.01)
        return tuple(found)

    def widths(self) -> list[int]:
        """Slots that are expanded at each depth, the root's first."""
        assert self.frontier is not None
        found = [1]
        while len(found) < self.depth:
            found.append(min(self.frontier, found[-1] * self.children))
        return found

    @property
    def candidates(self) -> int:
        """All children that are drawn in a pass."""
        return self.expanded * self.children

    @property
    def expanded(self) -> int:
        """Slots that are expanded in a pass."""
        return sum(self.widths())

    def narrowed(self, children: int) -> DynamicTree:
        """The same with at most so many children of a slot, and of as many nodes as that leaves."""
        narrow = replace(self, children=min(self.children, children), nodes=1)
        return replace(narrow, nodes=min(self.nodes, narrow.candidates))

    def cut(self, depth: int) -> DynamicTree:
        """The same in fewer levels, and of as many nodes as these have."""
        shorter = replace(self, depth=depth, nodes=1)
        return replace(shorter, nodes=min(self.nodes, shorter.candidates))


@dataclass(frozen=True)
class AutoTree:
    """The tree with the most tokens a second, from the measured cost of passes and the recent acceptance of siblings by depth
    and rank; a chain, or nothing, where more does not pay.

    The choice follows a clock and the batch: the distribution of the pictures is the same, and with the rule `shared_noise` the
    pictures are. On a GPU the tree is settled before the first pass.

    Args:
        nodes, depth, children: most drafted tokens of a pass, steps from the root, and children of a slot.
        acceptance: by rank, what is taken for the acceptance before a pass has shown it; see `DynamicTree`.

    Raises:
        ValueError: for values outside the ranges of `DynamicTree`.
    """

    nodes: int = 31
    depth: int = 16
    children: int = 3
    acceptance: tuple[float, ...] = field(default=ACCEPTANCE)

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "children"):
            value = parse_int(getattr(self, name), 1, MAX_TREE_WIDTH - 1)
            if value is None:
                given = short_repr(getattr(self, name))
                raise ValueError(f"{name} of a tree must be a whole number from 1 to {MAX_TREE_WIDTH - 1}, got {given}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "acceptance", DynamicTree(1, 1, 1, acceptance=self.acceptance).acceptance)

    @property
    def expanded(self) -> int:
        """Most slots that are expanded in a pass."""
        return self.nodes

    def cut(self, depth: int) -> AutoTree:
        """The same in fewer levels."""
        return replace(self, depth=min(self.depth, depth))

    def narrowed(self, children: int) -> AutoTree:
        """The same with at most so many children of a slot."""
        return replace(self, children=min(self.children, children))


TreeShape = StaticTree | DynamicTree


def parse_shape(value: Any) -> TreeShape | AutoTree:
    """The shape of a name, `"auto"`, or parents; a shape itself.

    Raises:
        ValueError, TypeError: see `parse_parents`.
    """
    if isinstance(value, StaticTree | DynamicTree | AutoTree):
        return value
    return AutoTree() if isinstance(value, str) and value == "auto" else StaticTree(value)

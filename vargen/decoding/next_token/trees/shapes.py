"""Tree shapes as data: static trees, the same in every pass, and dynamic trees, which are built for each image and pass.

A static tree is a tuple of parents, root first: `(-1, 0, 0, 1, 1)` is a root with two children, the first of which has two
children. Siblings are ranked by their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vargen.values import number_field, parse_float, parse_int, short_repr, suggest_names, validate_fields

MAX_TREE_WIDTH = 256  # maximum number of tokens per pass
_limit = partial(number_field, least=1, most=MAX_TREE_WIDTH - 1, is_integer=True)


def make_chain(length: int) -> tuple[int, ...]:
    """Chain of `length` draft tokens."""
    return tuple(range(-1, length))


def make_k_ary(children: int, depth: int) -> tuple[int, ...]:
    """Complete tree: every slot above `depth` has `children` children."""
    return make_branching([children] * depth)


def make_branching(children: Sequence[int]) -> tuple[int, ...]:
    """Every slot at depth d has `children[d]` children (RSD-C of Jeon et al. 2024)."""
    parents, level = [-1], [0]
    for count in children:
        below = range(len(parents), len(parents) + len(level) * count)
        parents += [slot for slot in level for _ in range(count)]
        level = list(below)
    return tuple(parents)


def make_by_level_sizes(widths: Sequence[int]) -> tuple[int, ...]:
    """Tree with `widths[d]` slots at depth d + 1, attached to the parents with the lowest sum of ranks along the path.

    It is the best tree with these widths if each sibling is less likely than the previous one by a constant factor.
    """
    parents, level = [-1], [(0, 0)]  # one level: (sum of ranks, slot)
    for width in widths:
        candidates = sorted((ranks + rank, slot, rank) for ranks, slot in level for rank in range(width))[:width]
        candidates.sort(key=lambda each: each[1:])  # by parent, then rank
        below = [(ranks, len(parents) + index) for index, (ranks, _, _) in enumerate(candidates)]
        parents += [slot for _, slot, _ in candidates]
        level = below
    return tuple(parents)


def make_fan(width: int, children: int, depth: int) -> tuple[int, ...]:
    """The tree of SJD-PAC: complete above `depth`, with a chain after the first leaf that fills up to `width` slots.

    Every slot above `depth` has `children` children.
    """
    parents = make_k_ary(children, depth)
    if width < len(parents):
        raise ValueError(f"width must be at least {len(parents)} for {children} children to depth {depth}, got {width}")
    first = len(parents) - children**depth  # the first of the deepest slots
    return parents + tuple(first if slot == len(parents) else slot - 1 for slot in range(len(parents), width))


NAMED_SHAPES: dict[str, tuple[int, ...]] = {
    "wide-15": make_by_level_sizes((4, 5, 4, 2)),
    "fan-24": make_fan(24, 2, 2),
}


def compute_depths(parents: Sequence[int]) -> list[int]:
    """Return the distance of each slot from the root."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def parse_parents(value: Any) -> tuple[int, ...]:
    """Return the parents of a static tree given by name or by its parents."""
    if isinstance(value, str):
        if value not in NAMED_SHAPES:
            raise ValueError(
                f"unknown tree {short_repr(value)}; {suggest_names(value, NAMED_SHAPES)}, or give the parents of its slots"
            )
        return NAMED_SHAPES[value]
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
        parents: of the slots, root first, or a name in `NAMED_SHAPES`.

    Raises:
        ValueError, TypeError: see `parse_parents`.
    """

    parents: tuple[int, ...] | str = "wide-15"

    def __post_init__(self) -> None:
        if not isinstance(self.parents, str):
            object.__setattr__(self, "parents", parse_parents(self.parents))
        parse_parents(self.parents)

    @property
    def parents_tuple(self) -> tuple[int, ...]:
        """The parents of the slots, also if they were given by a name."""
        return parse_parents(self.parents)

    @property
    def nodes(self) -> int:
        """Number of draft tokens per pass."""
        return len(self.parents_tuple) - 1

    @property
    def depth(self) -> int:
        return max(compute_depths(self.parents_tuple))

    @property
    def children(self) -> int:
        """Largest number of children of a slot."""
        return max(self.parents_tuple.count(slot) for slot in range(len(self.parents_tuple)))

    @property
    def num_expanded(self) -> int:
        """Number of slots that have children."""
        return sum(self.expanded_per_level())

    def expanded_per_level(self) -> list[int]:
        """Number of slots that have children at each depth, starting with the root."""
        depths, expanded = compute_depths(self.parents_tuple), set(self.parents_tuple[1:])
        return [sum(depths[slot] == depth for slot in expanded) for depth in range(max(depths))]

    def limit_depth(self, depth: int) -> StaticTree:
        """Return the tree without slots deeper than `depth`."""
        return self._drop_subtrees([each > depth for each in compute_depths(self.parents_tuple)])

    def limit_children(self, children: int) -> StaticTree:
        """Return the tree with only the first `children` children of each slot."""
        parents = self.parents_tuple
        return self._drop_subtrees([parents[:slot].count(parent) >= children for slot, parent in enumerate(parents)])

    def _drop_subtrees(self, dropped: Sequence[bool]) -> StaticTree:
        """Return the tree without these slots and their descendants."""
        kept, parents = {0: 0}, [-1]
        for slot, parent in enumerate(self.parents_tuple[1:], 1):
            if parent in kept and not dropped[slot]:
                kept[slot] = len(parents)
                parents.append(kept[parent])
        return StaticTree(tuple(parents))


DEFAULT_SIBLING_RATES = (0.6, 0.14, 0.07, 0.04)  # acceptance rates of the first, second, ... sibling


def rates_by_rank(rates: Sequence[float], children: int) -> list[float]:
    """Return the acceptance rates of `children` siblings; the last of `rates` applies to all further ranks."""
    return [rates[min(rank, len(rates) - 1)] for rank in range(children)]


@dataclass(frozen=True)
class DynamicTree:
    """A tree built for each image and pass: it grows level by level, and the best `nodes` of all candidates are kept.

    Li et al. 2024, EAGLE-2: each level expands the `frontier` most probable slots into `children` candidates each; then the
    most probable `nodes` of all candidates are kept. Children are never more probable than their parents, and ties go to
    parents and earlier siblings, so the kept slots form a tree.

    Args:
        nodes: number of draft tokens per pass.
        depth: maximum distance from the root.
        children: maximum number of children of a slot.
        frontier: number of slots expanded per level; None: `children`.
        acceptance: for sampled draft tokens, the acceptance rates of the first, second, ... sibling,
            each above 0 and with a sum below 1; the last rate applies to all further ranks. They determine what is expanded
            and kept.

    Raises:
        ValueError: if a value is out of range, or there are fewer candidates than `nodes`.
    """

    nodes: int = _limit(15)
    depth: int = _limit(4)
    children: int = _limit(4)
    frontier: int | None = _limit(None, optional=True)
    acceptance: tuple[float, ...] = DEFAULT_SIBLING_RATES

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.frontier is None:
            object.__setattr__(self, "frontier", self.children)
        rates = [parse_float(rate) for rate in self.acceptance] if isinstance(self.acceptance, list | tuple) else []
        if not rates or any(rate is None or not rate > 0 for rate in rates) or sum(rates) >= 1:  # type: ignore[arg-type]
            given = short_repr(self.acceptance)
            raise ValueError(f"acceptance must be rates in (0, 1), one for each rank, with a sum below 1, got {given}")
        object.__setattr__(self, "acceptance", tuple(rates))
        if self.nodes > self.num_candidates:
            raise ValueError(
                f"nodes must be at most the {self.num_candidates} candidates of {self.depth} levels with {self.frontier} slots "
                f"of {self.children} children, got {self.nodes}"
            )

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """Acceptance rate of a sibling by rank, given that all earlier siblings are rejected."""
        found, rejected = [], 1.0  # probability that all earlier siblings are rejected
        for rate in rates_by_rank(self.acceptance, self.children):
            found.append(min(rate / rejected, 0.99))
            rejected = max(rejected - rate, 0.01)
        return tuple(found)

    def expanded_per_level(self) -> list[int]:
        """Number of slots expanded at each depth, starting with the root."""
        assert self.frontier is not None
        found = [1]
        while len(found) < self.depth:
            found.append(min(self.frontier, found[-1] * self.children))
        return found

    @property
    def num_candidates(self) -> int:
        """Number of children sampled per pass."""
        return self.num_expanded * self.children

    @property
    def num_expanded(self) -> int:
        """Number of slots expanded per pass."""
        return sum(self.expanded_per_level())

    def limit_children(self, children: int) -> DynamicTree:
        """Return the tree with at most `children` children per slot, and `nodes` limited to the remaining candidates."""
        narrow = replace(self, children=min(self.children, children), nodes=1)
        return replace(narrow, nodes=min(self.nodes, narrow.num_candidates))

    def limit_depth(self, depth: int) -> DynamicTree:
        """Return the tree with `depth` levels, and `nodes` limited to their candidates."""
        shorter = replace(self, depth=depth, nodes=1)
        return replace(shorter, nodes=min(self.nodes, shorter.num_candidates))


TreeShape = StaticTree | DynamicTree


def parse_shape(value: Any) -> TreeShape:
    """Return the shape for a name or a tuple of parents; a shape is returned unchanged."""
    return value if isinstance(value, StaticTree | DynamicTree) else StaticTree(value)

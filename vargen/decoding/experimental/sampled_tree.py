"""Trees of a small model whose siblings are sampled independently of each other, for k-SEQ.

Shape suffixes: B slots, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from vargen.decoding.experimental.small_model_tree import SpeculativeTree
from vargen.decoding.interfaces import TokenModel
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Tree
from vargen.decoding.tree_drafters import MAX_TREE_WIDTH, DynamicTree
from vargen.values import short_repr


@dataclass(frozen=True)
class SampledTree(SpeculativeTree):
    """A complete tree of a smaller model, whose siblings are sampled independently of each other: always as many.

    Args:
        model: see `SpeculativeTree`.
        branching: number of children of each slot, by depth.

    Raises:
        ValueError: if a number is below 1, or there are too many slots. `bind` raises it as for `SpeculativeTree`.
    """

    provides = ("independent-per-pass", "with-replacement")

    branching: tuple[int, ...] = (4, 2, 1)
    shape: DynamicTree = field(init=False, repr=False)
    levels: list[Tree] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = list(accumulate(self.branching, operator.mul))  # number of slots by depth
        if not sizes or min(sizes) < 1 or sum(sizes) >= MAX_TREE_WIDTH:
            limit = f"at least 1, for fewer than {MAX_TREE_WIDTH} slots in all"
            raise ValueError(f"branching must be numbers of children of {limit}, got {short_repr(self.branching)}")
        shape = DynamicTree(sum(sizes), len(sizes), max(self.branching), frontier=sizes[-1])
        object.__setattr__(self, "shape", shape)
        super().__post_init__()

    def bind(self, model: TokenModel, slots: int) -> Self:
        depth = max(1, model.grid[0] * model.grid[1] - 1)
        fitted = replace(self, branching=tuple(min(count, model.vocab) for count in self.branching[:depth]))
        parents = [complete_tree(fitted.branching[:depth]) for depth in range(len(fitted.branching) + 1)]
        levels = [Tree.from_parents(each, model.device) for each in parents]
        return super(SampledTree, fitted).bind(model, slots).copy(levels=levels)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        fed, rows, count = state.tokens.gather(1, state.length[:, None] - 1), list[Tensor](), 1
        for depth, children in enumerate(self.branching):
            q = self.predict(state, fed, self.levels[depth], count).repeat_interleave(children, 1)  # one row for each child
            count = q.shape[1]
            number = torch.arange(count, device=q.device)
            fed = torch.cat([fed, noise.shift(depth).fold_in(number).sample(q, Purpose.DRAFT)], 1)
            rows.append(q)
        tree = self.levels[-1]
        return Draft(fed[:, 1:], tree, torch.cat(rows, 1), noise.position + tree.depth[1:] - 1 < state.num_tokens)


def complete_tree(branching: Sequence[int]) -> tuple[int, ...]:
    """Return the parents of a tree, level by level, in which each node at depth d has `branching[d]` children."""
    parents, level = [-1], [0]
    for count in branching:
        first = len(parents)
        parents += [node for node in level for _ in range(count)]
        level = list(range(first, len(parents)))
    return tuple(parents)

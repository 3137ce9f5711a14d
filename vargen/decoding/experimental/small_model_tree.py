"""Trees of a small model: grown by its probabilities, or complete, with independent siblings, for k-SEQ.

Shape suffixes: B slots, W newest tokens, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.speculative import require_draft_model
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, Tree
from vargen.decoding.tree_drafters import MAX_TREE_WIDTH, DynamicTree, Frontier, TreeDrafter
from vargen.values import short_repr


@dataclass(frozen=True)
class SpeculativeTree(TreeDrafter):
    """Draft a tree with a smaller model, one of its passes per level.

    Args:
        shape: of the trees.
        model: the draft model. None: `draft_model` of the target.

    Raises:
        ValueError: `bind` raises it if the draft model is missing or has another vocabulary or grid.
    """

    shape: DynamicTree = field(default_factory=DynamicTree)
    model: Any = None

    cache: Any = field(init=False, repr=False, compare=False)
    newest: Tree = field(init=False, repr=False, compare=False)

    def bind(self, model: TokenModel, slots: int) -> Self:
        small = require_draft_model(self.model or model.draft_model, model).bind(slots)
        bound = super().bind(model, slots)
        newest = Tree.make_chain(bound.shape.depth + 1, model.device)
        return bound.copy(model=small, cache=None, newest=newest)

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        if self.cache is None:
            width = max(self.shape.depth + 2, self.shape.num_expanded)
            self.keep(cache=self.model.allocate(condition, width, len(state.seeds)))
        self.model.prefill(condition, self.cache, rows)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        def expand(frontier: Frontier) -> Tensor:
            return self.predict(state, frontier.expanded_tokens, frontier.tree, frontier.tokens.shape[1])

        return self.grow(expand, state, noise)

    def predict(self, state: TokenState, tokens: Tensor, tree: Tree, count: int) -> Tensor:
        """Return the probabilities float32 `[B, F, V]` after the last `count` F of E `tokens`, the root and draft tokens.

        The draft model does not cache draft tokens: each level feeds the root and all expanded slots again. The first level
        feeds the tokens that were committed since the last draft instead, the root among them.
        """
        if tokens.shape[1] == 1:
            return state.sampling.probs(self._catch_up(state))
        return state.sampling.probs(self.model.forward(tokens, self.cache, tree).logits[:, -count:])

    def _catch_up(self, state: TokenState) -> Tensor:
        """Feed the newest committed tokens, after which everything before the root is in the cache.

        Returns the logits after the root, `[B, 1, V]`. A pass commits at most depth + 1 tokens.
        """
        W, length = self.shape.depth + 2, state.length
        slots, start = torch.arange(W, device=length.device), (length - W).clamp(min=0)
        self.model.rollback(self.cache, start)
        logits = self.model.forward(state.tokens.gather(1, start[:, None] + slots), self.cache, self.newest).logits
        root = length - 1 - start
        self.model.commit(self.cache, slots.expand(len(length), W), root, self.newest)
        return logits.gather(1, root[:, None, None].expand(-1, 1, logits.shape[-1]))


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

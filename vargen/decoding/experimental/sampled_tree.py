"""Trees of a small model whose siblings are sampled independently of each other, for k-SEQ.

Shape suffixes: B slots, V vocabulary.
"""

from __future__ import annotations

import operator
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
from vargen.values import parse_int, short_repr


@dataclass(frozen=True)
class SampledTree(SpeculativeTree):
    """A complete tree of a smaller model, whose siblings are sampled independently of each other: always as many.

    Args:
        model: see `SpeculativeTree`.
        branching: number of children of each slot, by depth.

    Raises:
        TypeError: if `branching` is no sequence of whole numbers.
        ValueError: if a number is below 1, or there are too many slots. `bind` raises it as for `SpeculativeTree`.
    """

    provides = ("independent-per-pass", "with-replacement")

    branching: tuple[int, ...] = (4, 2, 1)
    shape: DynamicTree = field(init=False, repr=False)
    levels: list[Tree] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = self.branching if isinstance(self.branching, list | tuple) else ()
        counts = [parse_int(count, 1) for count in given]
        whole = [count for count in counts if count is not None]
        widths = list(accumulate(whole, operator.mul))
        if not whole or len(whole) < len(counts) or sum(widths) >= MAX_TREE_WIDTH:
            raise (ValueError if given else TypeError)(
                f"branching must be numbers of children of at least 1, by depth, with fewer than {MAX_TREE_WIDTH} slots in "
                f"all, got {short_repr(self.branching)}"
            )
        object.__setattr__(self, "branching", tuple(whole))
        object.__setattr__(self, "shape", DynamicTree(1, len(whole), max(whole), max(widths)))
        super().__post_init__()

    def fit_to_grid(self, tokens: int, vocab: int | None = None) -> Self:
        fitted = tuple(min(count, vocab or count) for count in self.branching[: max(tokens - 1, 1)])
        return self if fitted == self.branching else replace(self, branching=fitted)

    @property
    def width(self) -> int:
        return len(_parents(self.branching))

    def bind(self, model: TokenModel, slots: int) -> Self:
        parts = [self.branching[:depth] for depth in range(len(self.branching) + 1)]
        levels = [Tree.from_parents(tuple(_parents(part)), model.device) for part in parts]
        return super().bind(model, slots).copy(levels=levels)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        fed, rows = state.tokens.gather(1, state.length[:, None] - 1), list[Tensor]()
        for depth, count in enumerate(self.branching):
            if depth:
                assert self.model is not None
                logits = self.model.forward(fed, self.cache, self.levels[depth]).logits[:, -rows[-1].shape[1] :]
            else:
                logits = self._catch_up(state)
            q = state.sampling.probs(logits).repeat_interleave(count, 1)  # one row for each child
            number = torch.arange(q.shape[1], device=q.device)
            fed = torch.cat([fed, noise.shift(depth).fold_in(number).sample(q, Purpose.DRAFT)], 1)
            rows.append(q)
        tree, probs = self.levels[-1], torch.cat(rows, 1)
        valid = (noise.position + tree.depth[1:] - 1 < state.num_tokens) & (probs.gather(2, fed[:, 1:, None])[..., 0] > 0)
        return Draft(fed[:, 1:], tree, probs, valid)


def _parents(branching: tuple[int, ...]) -> list[int]:
    parents, level = [-1], [0]
    for count in branching:
        below = range(len(parents), len(parents) + len(level) * count)
        parents += [slot for slot in level for _ in range(count)]
        level = list(below)
    return parents

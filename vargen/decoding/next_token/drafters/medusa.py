"""Medusa drafting: trained heads predict several tokens ahead from one feature of the target.

Source: Cai et al. 2024 (arXiv:2401.10774). The feature is the one that predicted the root, so every pass already provides what
the next draft needs. All slots of a level have the same q, because heads do not see each other's tokens.

Shape suffixes: B images, h heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Output, Step
from vargen.decoding.next_token.drafters.heads import Features, HeadDrafter, there
from vargen.decoding.next_token.protocols import ParallelHeads, TokenModel
from vargen.decoding.next_token.trees.expand import Frontier, grow
from vargen.decoding.next_token.trees.search import TreeController
from vargen.decoding.next_token.trees.shapes import AutoTree, DynamicTree, TreeShape
from vargen.decoding.noise import Noise
from vargen.decoding.pass_costs import timed
from vargen.decoding.sampling import Sampling, to_probs
from vargen.values import short_repr


@dataclass
class _State:
    model: ParallelHeads
    features: Features
    sampling: Sampling
    seeds: Tensor
    total: int
    choice: TreeController | None = None


@dataclass(frozen=True)
class Medusa(HeadDrafter):
    """Draft chains and trees with Medusa heads, at most as deep as there are heads; see `HeadDrafter`."""

    shape: TreeShape | AutoTree | str | int | tuple[int, ...] = field(default_factory=lambda: DynamicTree(nodes=15, depth=3))
    kind: ClassVar[str] = "medusa"
    protocol: ClassVar[type] = ParallelHeads

    def bind(self, model: TokenModel) -> Self:
        heads = self.trained(model).heads
        if isinstance(self.tree, AutoTree) and self.tree.depth > heads:
            return replace(self, shape=self.tree.cut(heads)).bind(model)
        if self.tree.depth > heads:
            raise ValueError(
                f"depth of a tree must be from 1 to the drafter's {heads} heads, got {short_repr(self.tree.depth)}"
            )
        return super().bind(model)

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        images, heads = len(seeds), self.trained(model)
        spent = _seconds(heads, first, images) if isinstance(self.tree, AutoTree) else 0.0
        choice = self.choice(model, condition, images, 0.0, lambda parents: spent)
        return _State(heads, Features.first(first, images), sampling, seeds, model.grid[0] * model.grid[1], choice)

    def cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Measured seconds of the heads for a draft; tree construction is excluded."""
        return _seconds(self.trained(model), model.prefill(condition, 1)[1], images) if drafts else 0.0

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        tree = self.chosen(state.choice)
        if tree is None:
            return Draft.empty(len(tokens), state.model.vocab, tokens.device)
        root = tokens.gather(1, length[:, None] - 1)[:, 0]
        logits = state.model.forward(root, state.features.last(), length - 1)[:, : tree.depth]
        probs = to_probs(logits, state.sampling)

        def expand(frontier: Frontier) -> Tensor:
            return probs[:, frontier.depth, None].expand(-1, frontier.tokens.shape[1], -1)

        return grow(expand, tree, self.drawing, root, Noise(state.seeds, length[:, None], step), state.total)

    def observe(self, state: _State, step: Step) -> _State:
        state.features.observe(step)
        if state.choice is not None:
            state.choice.observe(step, state.total)
        return state


def _seconds(heads: ParallelHeads, first: Output, images: int) -> float:
    """Measure the seconds of one evaluation of the heads."""
    features = there(first.features)
    root = torch.zeros(images, dtype=torch.int64, device=features.device)
    return min(timed(lambda: heads.forward(root, features, root), features.device)[0] for _ in range(4))

"""Medusa drafting: trained heads predict several tokens ahead from one feature of the target.

Source: Cai et al. 2024 (arXiv:2401.10774). The feature is that by which the root was drawn, so a pass leaves all that the next
draft needs. All slots of a level have the same q: heads do not see each other's tokens.

Shape suffixes: B images, h heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from vargen.decoding.draft import Draft, Output, Step
from vargen.decoding.drafters.features import Features, FeatureTree
from vargen.decoding.feature_protocols import FeatureHeads
from vargen.decoding.growth import Frontier, grow
from vargen.decoding.noise import Noise
from vargen.decoding.protocols import TokenModel
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.trees import DynamicTree, TreeShape
from vargen.values import shown


@dataclass
class _State:
    model: FeatureHeads
    features: Features
    sampling: Sampling
    seeds: Tensor
    total: int


@dataclass(frozen=True)
class Medusa(FeatureTree):
    """Chains and trees from Medusa's heads, at most as deep as there are heads; see `FeatureTree`."""

    shape: TreeShape | str | int | tuple[int, ...] = field(default_factory=lambda: DynamicTree(nodes=15, depth=3))
    kind: ClassVar[str] = "medusa"
    protocol: ClassVar[type] = FeatureHeads

    def bind(self, model: TokenModel) -> Self:
        heads = self.trained(model).heads
        if self.tree.depth > heads:
            raise ValueError(f"depth of a tree must be from 1 to the drafter's {heads} heads, got {shown(self.tree.depth)}")
        return super().bind(model)

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        return _State(self.trained(model), Features.first(first, len(seeds)), sampling, seeds, model.grid[0] * model.grid[1])

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int) -> Draft:
        root = tokens.gather(1, length[:, None] - 1)[:, 0]
        logits = state.model.forward(root, state.features.last(), length - 1)[:, : self.tree.depth]
        probs = to_probs(logits, state.sampling)

        def expand(frontier: Frontier) -> Tensor:
            return probs[:, frontier.depth, None].expand(-1, frontier.tokens.shape[1], -1)

        return grow(expand, self.tree, self.drawing, root, Noise(state.seeds, length[:, None], step), state.total)

    def observe(self, state: _State, step: Step) -> None:
        state.features.observe(step)

"""Medusa drafting: trained heads predict several tokens ahead from one feature of the target.

Source: Cai et al. 2024 (arXiv:2401.10774). The feature is the one that predicted the root, so every pass already provides what
the next draft needs. All slots of a level have the same q, because heads do not see each other's tokens.

Shape suffixes: B images, h heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from vargen.decoding.interfaces import DraftHead, ParallelHeads, TokenModel
from vargen.decoding.next_token.drafters.heads import FeatureBuffer, HeadDrafter
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.next_token.trees.expand import Frontier, grow_tree
from vargen.decoding.next_token.trees.shapes import DynamicTree, TreeShape
from vargen.decoding.noise import Noise
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.tree import Draft, Output, Step


@register_state
@dataclass
class MedusaState:
    features: FeatureBuffer
    sampling: Sampling
    num_tokens: int


@dataclass(frozen=True)
class Medusa(HeadDrafter):
    """Draft chains and trees with Medusa heads, at most as deep as there are heads; see `HeadDrafter`."""

    shape: TreeShape | str | int | tuple[int, ...] = field(default_factory=lambda: DynamicTree(nodes=15, depth=3))
    kind: ClassVar[str] = "medusa"
    head_class: ClassVar[type[DraftHead]] = ParallelHeads

    def bind(self, model: TokenModel) -> Self:
        heads, shape = self.find_head(model).num_heads, self.tree_shape
        if shape.depth <= heads:
            return super().bind(model)
        raise ValueError(f"depth of a tree must be from 1 to the number of heads, {heads}, got {shape.depth}")

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> MedusaState:
        images, num_tokens = len(seeds), model.grid[0] * model.grid[1]
        return MedusaState(FeatureBuffer.from_prefill(first, images), sampling, num_tokens)

    def propose(self, state: MedusaState, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        tree = self.tree_shape
        root = tokens.gather(1, length[:, None] - 1)[:, 0]
        logits = self.model.forward(root, state.features.gather_last(), length - 1)[:, : tree.depth]
        probs = to_probs(logits, state.sampling)

        def expand(frontier: Frontier) -> Tensor:
            return probs[:, frontier.depth, None].expand(-1, frontier.tokens.shape[1], -1)

        return grow_tree(expand, tree, self.child_sampling, root, noise, state.num_tokens)

    def observe(self, state: MedusaState, step: Step) -> MedusaState:
        return replace(state, features=state.features.observe(step))

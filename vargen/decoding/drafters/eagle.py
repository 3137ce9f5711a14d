"""EAGLE drafting: a trained layer continues the target's features token by token (Li et al. 2024, arXiv:2401.15077).

It runs once over the tokens that the last pass committed, with the target's own features, and once for each further level of
the draft, with its own.

Shape suffixes: B images, R rows of the target (B times its guidance halves), A slots of an accepted path, F slots of one level,
D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.decoding.cost import timed
from vargen.decoding.draft import Draft, Output, Step, Tree
from vargen.decoding.drafters.features import Features, FeatureTree, at_slots, there
from vargen.decoding.feature_protocols import FeatureModel
from vargen.decoding.growth import Frontier, grow
from vargen.decoding.noise import Noise
from vargen.decoding.protocols import TokenModel
from vargen.decoding.sampling import Sampling, to_probs


@dataclass
class _State:
    model: FeatureModel
    held: Any
    features: Features
    sampling: Sampling
    seeds: Tensor
    total: int


@dataclass(frozen=True)
class Eagle(FeatureTree):
    """Chains and trees from an EAGLE layer, one pass of it for each level; see `FeatureTree`."""

    kind: ClassVar[str] = "eagle"
    protocol: ClassVar[type] = FeatureModel

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        drafter = self.trained(model)
        held = drafter.start(len(seeds), max(self.tree.depth + 1, self.tree.expanded))
        return _State(drafter, held, Features.first(first, len(seeds)), sampling, seeds, model.grid[0] * model.grid[1])

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int) -> Draft:
        model, held = state.model, state.held
        level = Output(tokens, None)

        def expand(frontier: Frontier) -> Tensor:
            nonlocal level
            if frontier.depth:
                features = at_slots(there(level.features), frontier.parent)
                level = model.forward(frontier.tokens, features, held, frontier.tree)
            else:
                level = _continued(model, held, state.features, tokens, length)
            return to_probs(level.logits, state.sampling)

        root = tokens.gather(1, length[:, None] - 1)[:, 0]
        draft = grow(expand, self.tree, self.drawing, root, Noise(state.seeds, length[:, None], step), state.total)
        model.commit(held, state.features.count.clamp(max=1))  # the root, to which the levels were behind
        return draft

    def observe(self, state: _State, step: Step) -> None:
        state.features.observe(step)

    def cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Seconds of the layer's passes behind a draft, measured; what builds the tree is left out."""
        if not drafts:
            return 0.0
        device = torch.device(model.device)
        seeds = torch.zeros(images, dtype=torch.int64, device=device)
        clock = _Clock(self.trained(model))
        _, first = model.prefill(condition, self.max_fed)
        state = self.start(model, condition, seeds, Sampling(), first)
        state.model = clock
        tokens = torch.zeros(images, state.total + self.max_fed, dtype=torch.int64, device=device)
        spent = []
        for _ in range(4):
            clock.seconds = 0.0
            self.propose(state, tokens, torch.ones_like(seeds), 0)
            spent.append(clock.seconds)
            state.features.count = torch.zeros_like(seeds)
        return min(spent[1:])


class _Clock:
    """A `FeatureModel` that counts the seconds of its passes."""

    def __init__(self, model: FeatureModel):
        self.model, self.seconds = model, 0.0
        self.vocab, self.grid, self.start, self.commit = model.vocab, model.grid, model.start, model.commit

    def forward(self, tokens: Tensor, features: Tensor, state: Any, tree: Tree) -> Output:
        seconds, output = timed(lambda: self.model.forward(tokens, features, state, tree), tokens.device)
        self.seconds += seconds
        return output


def _continued(model: FeatureModel, held: Any, features: Features, tokens: Tensor, length: Tensor) -> Output:
    """Feed the newest tokens with the target's features, and keep all but the root, at which a draft begins.

    Returns:
        Logits `[B, 1, V]` and features `[R, 1, D]` of what follows the root.
    """
    A, device = features.held.shape[1], tokens.device
    place = (length - features.count)[:, None] + torch.arange(A, device=device)
    newest = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
    out = model.forward(newest, features.held, held, Tree.of_chain(A - 1, device))
    last = (features.count - 1).clamp(min=0)  # a finished image has none
    model.commit(held, last)
    return Output(at_slots(out.logits, last[:, None]), at_slots(there(out.features), last[:, None]))

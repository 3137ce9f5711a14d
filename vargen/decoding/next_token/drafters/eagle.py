"""EAGLE drafting: a trained layer extrapolates the target's features token by token (Li et al. 2024, arXiv:2401.15077).

The layer runs once over the tokens committed by the last pass, with the target's own features, and then once per further level
of the draft, with its own features.

Shape suffixes: B images, R rows of the target (B, times two with CFG), A slots of an accepted path, F slots of one level, D
width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.decoding.interfaces import AutoregressiveHead, DraftHead, TokenModel
from vargen.decoding.next_token.drafters.heads import FeatureBuffer, HeadDrafter, gather_slots, require_features
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.next_token.trees.expand import Frontier, grow_tree
from vargen.decoding.noise import Noise
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.tree import Draft, Output, Step, Tree


@register_state
@dataclass
class EagleState:
    cache: Any
    features: FeatureBuffer
    sampling: Sampling
    num_tokens: int


@dataclass(frozen=True)
class Eagle(HeadDrafter):
    """Draft chains and trees with an EAGLE layer, one of its passes per level; see `HeadDrafter`."""

    kind: ClassVar[str] = "eagle"
    head_class: ClassVar[type[DraftHead]] = AutoregressiveHead

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> EagleState:
        shape, num_tokens = self.tree_shape, model.grid[0] * model.grid[1]
        cache = self.model.start(len(seeds), max(shape.depth + 1, shape.num_expanded))
        return EagleState(cache, FeatureBuffer.from_prefill(first, len(seeds)), sampling, num_tokens)

    def propose(self, state: EagleState, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        head, cache = self.model, state.cache
        level = Output(tokens, None)

        def expand(frontier: Frontier) -> Tensor:
            nonlocal level
            if frontier.depth:
                features = gather_slots(require_features(level.features), frontier.parent)
                level = head.forward(frontier.tokens, features, cache, frontier.tree)
            else:
                level = _catch_up(head, cache, state.features, tokens, length)
            return to_probs(level.logits, state.sampling)

        root = tokens.gather(1, length[:, None] - 1)[:, 0]
        draft = grow_tree(expand, self.tree_shape, self.child_sampling, root, noise, state.num_tokens)
        head.commit(cache, state.features.count.clamp(max=1))  # the root, after which the levels were fed
        return draft

    def observe(self, state: EagleState, step: Step) -> EagleState:
        return replace(state, features=state.features.observe(step))


def _catch_up(model: AutoregressiveHead, cache: Any, features: FeatureBuffer, tokens: Tensor, length: Tensor) -> Output:
    """Feed the newest tokens with the target's features, and commit all of them except the root, where a draft starts.

    Returns:
        Logits `[B, 1, V]` and features `[R, 1, D]` after the root.
    """
    A, device = features.rows.shape[1], tokens.device
    place = (length - features.count)[:, None] + torch.arange(A, device=device)
    newest = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
    out = model.forward(newest, features.rows, cache, Tree.make_chain(A - 1, device))
    last = (features.count - 1).clamp(min=0)  # a finished image has no new tokens
    model.commit(cache, last)
    return Output(gather_slots(out.logits, last[:, None]), gather_slots(require_features(out.features), last[:, None]))

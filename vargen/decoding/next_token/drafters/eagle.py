"""EAGLE drafting: a trained layer extrapolates the target's features token by token (Li et al. 2024, arXiv:2401.15077).

The layer runs once over the tokens committed by the last pass, with the target's own features, and then once per further level
of the draft, with its own features.

Shape suffixes: B images, R rows of the target (B, times two with CFG), A slots of an accepted path, F slots of one level, D
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Output, Step, Tree
from vargen.decoding.next_token.drafters.heads import FeatureBuffer, HeadDrafter, gather_slots, require_features
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.next_token.protocols import AutoregressiveHead, DraftHead, TokenModel
from vargen.decoding.next_token.trees.expand import Frontier, grow_tree
from vargen.decoding.next_token.trees.search import TreeController
from vargen.decoding.next_token.trees.shapes import AutoTree, StaticTree, TreeShape
from vargen.decoding.noise import Noise
from vargen.decoding.pass_costs import interpolate_cost, time_call
from vargen.decoding.sampling import Sampling, to_probs
from vargen.deprecation import renamed_fields

_MEASURED_WIDTHS = (1, 2, 4, 8, 16, 32)  # level widths at which the cost of a pass is measured
_TYPICAL_COMMIT = 3  # assumed number of newly committed tokens when costs are compared


@register_state
@dataclass
class EagleState:
    cache: Any
    features: FeatureBuffer
    sampling: Sampling
    num_tokens: int
    controller: TreeController | None = None


@renamed_fields(drawing="child_sampling")
@dataclass(frozen=True)
class Eagle(HeadDrafter):
    """Draft chains and trees with an EAGLE layer, one of its passes per level; see `HeadDrafter`."""

    kind: ClassVar[str] = "eagle"
    head_class: ClassVar[type[DraftHead]] = AutoregressiveHead

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> EagleState:
        shape, num_tokens, controller = self.tree_shape, model.grid[0] * model.grid[1], None
        if isinstance(shape, AutoTree):
            seconds = _measure_level_seconds(self.model, first, len(seeds), num_tokens)
            controller = self.make_controller(
                model,
                condition,
                len(seeds),
                drafting=lambda parents: _sum_level_seconds(seconds, StaticTree(parents)),
                fixed_cost=interpolate_cost(seconds, _TYPICAL_COMMIT),
            )
        cache = self.model.start(len(seeds), max(shape.depth + 1, shape.num_expanded))
        return EagleState(cache, FeatureBuffer.from_prefill(first, len(seeds)), sampling, num_tokens, controller)

    def propose(self, state: EagleState, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        head, cache, tree = self.model, state.cache, self.next_shape(state.controller)
        if tree is None:  # update the head's cache without drafting
            _catch_up(head, cache, state.features, tokens, length)
            head.commit(cache, state.features.count.clamp(max=1))
            return Draft.make_empty(len(tokens), head.vocab, tokens.device)
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
        draft = grow_tree(expand, tree, self.child_sampling, root, noise, state.num_tokens)
        head.commit(cache, state.features.count.clamp(max=1))  # the root, after which the levels were fed
        return draft

    def observe(self, state: EagleState, step: Step) -> EagleState:
        if state.controller is not None:
            state.controller.observe(step, state.num_tokens)
        return replace(state, features=state.features.observe(step))

    def measure_cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Measured seconds of the layer's passes for a draft; tree construction is excluded."""
        if not drafts:
            return 0.0
        first = model.prefill(condition, 1)[1]
        seconds = _measure_level_seconds(self.find_head(model), first, images, model.grid[0] * model.grid[1])
        return interpolate_cost(seconds, _TYPICAL_COMMIT) + _sum_level_seconds(seconds, self.representative_shape(drafts))


def _sum_level_seconds(seconds: Mapping[int, float], shape: TreeShape) -> float:
    """Return the seconds of the layer's passes for a tree, except the first one, over the newest tokens."""
    return sum(interpolate_cost(seconds, width) for width in shape.expanded_per_level()[1:])


def _measure_level_seconds(model: AutoregressiveHead, first: Output, images: int, total: int) -> dict[int, float]:
    """Measure the seconds of a pass of the layer by the number of slots it feeds, with half an image in its cache.

    Args:
        first: output of the target's prefill.
        total: tokens of the grid.
    """
    device, widest = first.logits.device, max(1, min(max(_MEASURED_WIDTHS), total // 2))
    cache, features = model.start(images, widest), require_features(first.features)[:, :1]

    def feeds(fed: int) -> Callable[[], Output]:
        tokens = torch.zeros(images, fed, dtype=torch.int64, device=device)
        return lambda: model.forward(tokens, features.expand(-1, fed, -1), cache, Tree.make_chain(fed - 1, device))

    for _ in range(total // 2 // widest):
        feeds(widest)()
        model.commit(cache, torch.full((images,), widest, dtype=torch.int64, device=device))
    least: dict[int, float] = {}
    for fed in [fed for fed in _MEASURED_WIDTHS if fed <= widest] * 3:
        seconds, _ = time_call(feeds(fed), device)
        model.commit(cache, torch.zeros(images, dtype=torch.int64, device=device))
        least[fed] = min(seconds, least.get(fed, seconds))
    return least


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

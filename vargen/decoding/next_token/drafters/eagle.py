"""EAGLE drafting: a trained layer extrapolates the target's features token by token (Li et al. 2024, arXiv:2401.15077).

The layer runs once over the tokens committed by the last pass, with the target's own features, and then once per further level
of the draft, with its own features.

Shape suffixes: B images, R rows of the target (B, times two with CFG), A slots of an accepted path, F slots of one level, D
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Output, Step, Tree
from vargen.decoding.next_token.drafters.heads import Features, HeadDrafter, at_slots, there
from vargen.decoding.next_token.protocols import AutoregressiveHead, TokenModel
from vargen.decoding.next_token.trees.expand import Frontier, grow
from vargen.decoding.next_token.trees.search import TreeController, search_best_tree
from vargen.decoding.next_token.trees.shapes import AutoTree, StaticTree, TreeShape
from vargen.decoding.noise import Noise
from vargen.decoding.pass_costs import interpolate_cost, timed
from vargen.decoding.sampling import Sampling, to_probs

_WIDTHS = (1, 2, 4, 8, 16, 32)  # level widths at which the cost of a pass is measured
_COMMITTED = 3  # assumed number of newly committed tokens when costs are compared


@dataclass
class _State:
    model: AutoregressiveHead
    held: Any
    features: Features
    sampling: Sampling
    seeds: Tensor
    total: int
    choice: TreeController | None = None


@dataclass(frozen=True)
class Eagle(HeadDrafter):
    """Draft chains and trees with an EAGLE layer, one of its passes per level; see `HeadDrafter`."""

    kind: ClassVar[str] = "eagle"
    protocol: ClassVar[type] = AutoregressiveHead

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        drafter = self.trained(model)
        choice = None
        if isinstance(self.tree, AutoTree):
            seconds = _level_seconds(drafter, first, len(seeds), model.grid[0] * model.grid[1])
            kept_up = interpolate_cost(seconds, _COMMITTED)
            choice = self.choice(model, condition, len(seeds), kept_up, lambda parents: _levels(seconds, StaticTree(parents)))
        held = drafter.start(len(seeds), max(self.tree.depth + 1, self.tree.expanded))
        features, total = Features.first(first, len(seeds)), model.grid[0] * model.grid[1]
        return _State(drafter, held, features, sampling, seeds, total, choice)

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        model, held, tree = state.model, state.held, self.chosen(state.choice)
        if tree is None:  # update the head's cache without drafting
            _continued(model, held, state.features, tokens, length)
            model.commit(held, state.features.count.clamp(max=1))
            return Draft.empty(len(tokens), model.vocab, tokens.device)
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
        draft = grow(expand, tree, self.drawing, root, Noise(state.seeds, length[:, None], step), state.total)
        model.commit(held, state.features.count.clamp(max=1))  # the root, after which the levels were fed
        return draft

    def observe(self, state: _State, step: Step) -> _State:
        state.features.observe(step)
        if state.choice is not None:
            state.choice.observe(step, state.total)
        return state

    def cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Measured seconds of the layer's passes for a draft; tree construction is excluded."""
        if not drafts:
            return 0.0
        tree = self.tree
        if isinstance(tree, AutoTree):
            tree = StaticTree(search_best_tree([tree.acceptance], drafts, tree.depth))
        seconds = _level_seconds(self.trained(model), model.prefill(condition, 1)[1], images, model.grid[0] * model.grid[1])
        return interpolate_cost(seconds, _COMMITTED) + _levels(seconds, tree)


def _levels(seconds: Mapping[int, float], tree: TreeShape) -> float:
    """Return the seconds of the layer's passes for a tree, except the first one, over the newest tokens."""
    return sum(interpolate_cost(seconds, fed) for fed in tree.widths()[1:])


def _level_seconds(model: AutoregressiveHead, first: Output, images: int, total: int) -> dict[int, float]:
    """Measure the seconds of a pass of the layer by the number of slots it feeds, with half an image in its cache.

    Args:
        first: output of the target's prefill.
        total: tokens of the grid.
    """
    device, widest = first.logits.device, max(1, min(max(_WIDTHS), total // 2))
    held, features = model.start(images, widest), there(first.features)[:, :1]

    def feeds(fed: int) -> Callable[[], Output]:
        tokens = torch.zeros(images, fed, dtype=torch.int64, device=device)
        return lambda: model.forward(tokens, features.expand(-1, fed, -1), held, Tree.of_chain(fed - 1, device))

    for _ in range(total // 2 // widest):
        feeds(widest)()
        model.commit(held, torch.full((images,), widest, dtype=torch.int64, device=device))
    least: dict[int, float] = {}
    for fed in [fed for fed in _WIDTHS if fed <= widest] * 3:
        seconds, _ = timed(feeds(fed), device)
        model.commit(held, torch.zeros(images, dtype=torch.int64, device=device))
        least[fed] = min(seconds, least.get(fed, seconds))
    return least


def _continued(model: AutoregressiveHead, held: Any, features: Features, tokens: Tensor, length: Tensor) -> Output:
    """Feed the newest tokens with the target's features, and commit all of them except the root, where a draft starts.

    Returns:
        Logits `[B, 1, V]` and features `[R, 1, D]` after the root.
    """
    A, device = features.held.shape[1], tokens.device
    place = (length - features.count)[:, None] + torch.arange(A, device=device)
    newest = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
    out = model.forward(newest, features.held, held, Tree.of_chain(A - 1, device))
    last = (features.count - 1).clamp(min=0)  # a finished image has no new tokens
    model.commit(held, last)
    return Output(at_slots(out.logits, last[:, None]), at_slots(there(out.features), last[:, None]))

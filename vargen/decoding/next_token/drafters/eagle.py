"""EAGLE drafting: a trained layer continues the target's features token by token (Li et al. 2024, arXiv:2401.15077).

It runs once over the tokens that the last pass committed, with the target's own features, and once for each further level of
the draft, with its own.

Shape suffixes: B images, R rows of the target (B times its guidance halves), A slots of an accepted path, F slots of one level,
D width, V vocabulary.
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

_WIDTHS = (1, 2, 4, 8, 16, 32)  # of a level, whose costs are measured
_COMMITTED = 3  # tokens that are taken for the newest, where costs are compared


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
    """Chains and trees from an EAGLE layer, one pass of it for each level; see `HeadDrafter`."""

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
        if tree is None:  # it keeps up with what is drawn
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
        model.commit(held, state.features.count.clamp(max=1))  # the root, to which the levels were behind
        return draft

    def observe(self, state: _State, step: Step) -> None:
        state.features.observe(step)
        if state.choice is not None:
            state.choice.observe(step, state.total)

    def cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Seconds of the layer's passes behind a draft, measured; what builds the tree is left out."""
        if not drafts:
            return 0.0
        tree = self.tree
        if isinstance(tree, AutoTree):
            tree = StaticTree(search_best_tree([tree.acceptance], drafts, tree.depth))
        seconds = _level_seconds(self.trained(model), model.prefill(condition, 1)[1], images, model.grid[0] * model.grid[1])
        return interpolate_cost(seconds, _COMMITTED) + _levels(seconds, tree)


def _levels(seconds: Mapping[int, float], tree: TreeShape) -> float:
    """Seconds of the layer's passes behind a tree but for the first, over the newest tokens."""
    return sum(interpolate_cost(seconds, fed) for fed in tree.widths()[1:])


def _level_seconds(model: AutoregressiveHead, first: Output, images: int, total: int) -> dict[int, float]:
    """Seconds of a pass of the layer by the slots that it feeds, behind half of a picture.

    Args:
        first: of the target's prefill.
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

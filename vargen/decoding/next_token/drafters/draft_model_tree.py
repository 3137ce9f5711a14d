"""Speculative drafting of trees: a smaller model with the same vocabulary grows a tree, which the target verifies.

Shape suffixes: B images, F slots of one level, E slots expanded so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Output, Step, Tree
from vargen.decoding.next_token.drafters.base import TreeDrafter
from vargen.decoding.next_token.drafters.draft_model import Speculative
from vargen.decoding.next_token.protocols import TokenModel
from vargen.decoding.next_token.trees.expand import (
    CHILD_SAMPLING,
    Drawing,
    Frontier,
    check_vocabulary,
    grow,
    validate_child_sampling,
)
from vargen.decoding.next_token.trees.search import TreeController, search_best_tree, sizes
from vargen.decoding.next_token.trees.shapes import AutoTree, DynamicTree, StaticTree, TreeShape, parse_shape
from vargen.decoding.noise import Noise
from vargen.decoding.pass_costs import interpolate_cost, measure_pass_costs
from vargen.decoding.sampling import Sampling, to_probs


@dataclass
class _State:
    """State of B images. `choice`: controller that selects the tree of each pass, if the shape is automatic."""

    model: TokenModel
    held: Any
    sampling: Sampling
    seeds: Tensor
    total: int
    choice: TreeController | None = None


@dataclass(frozen=True)
class SpeculativeTree(TreeDrafter):
    """Draft a tree with a smaller model, one of its passes per level.

    Args:
        shape: a `DynamicTree`, or a `StaticTree`, also given by name or by its parents. `"auto"` or an `AutoTree` selects among
            static trees by measured costs and recent acceptance, and drafts nothing if drafting does not pay off.
        drawing: how the children of a slot are selected: `"sampled"` without replacement; `"independent"`, sampled with
            replacement, for static trees; `"best"`, the most probable; `"coupled"`, with the shared noise, for the rule
            `shared_noise`.
        model: the draft model. None: `draft_model` of the target.

    Raises:
        ValueError: if the tree or `drawing` is unknown. `bind` raises it if the tree does not fit the grid, a slot has more
            children than there are tokens, or the draft model is missing or has another vocabulary or grid.
        TypeError: if the shape or the model has the wrong type.
    """

    shape: TreeShape | AutoTree | str | tuple[int, ...] = field(default_factory=DynamicTree)
    drawing: Drawing = "sampled"
    model: TokenModel | None = None
    topology: str = field(default="tree", init=False)

    def __post_init__(self) -> None:
        validate_child_sampling(self.drawing, self.tree)
        Speculative(model=self.model)

    @property
    def tree(self) -> TreeShape | AutoTree:
        """The resolved shape."""
        return parse_shape(self.shape)

    @property
    def offers(self) -> tuple[str, ...]:
        """See `OfferingDrafter`."""
        return CHILD_SAMPLING[self.drawing]

    def bind(self, model: TokenModel) -> SpeculativeTree:
        """Return this drafter; an automatic tree is limited to the grid."""
        tokens = model.grid[0] * model.grid[1]
        Speculative(1, self.model).small_model(model)
        check_vocabulary(self.tree, model.vocab)
        self.check_grid(tokens)
        return self.fitted(tokens)

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        small, choice = Speculative(1, self.model).small_model(model), None
        if isinstance(self.tree, AutoTree):
            images, settled = len(seeds), model.device.type != "cpu"
            drafting = measure_pass_costs(small, condition, images, sizes(self.tree))
            seconds = measure_pass_costs(model, condition, images, sizes(self.tree))
            choice = TreeController(self.tree, seconds, lambda parents: self._drafting(drafting, StaticTree(parents)), settled)
        held, _ = small.prefill(condition, max(self.tree.depth + 2, self.tree.expanded))
        return _State(small, held, sampling, seeds, model.grid[0] * model.grid[1], choice)

    def _drafting(self, seconds: Mapping[int, float], tree: TreeShape) -> float:
        """Return the seconds the draft model spends on a tree, interpolated from measured pass costs by number of tokens."""
        fed = [self.tree.depth + 2, *accumulate(tree.widths())][: tree.depth + 1]
        del fed[1:2]  # the first level is part of the pass that feeds committed tokens
        return sum(interpolate_cost(seconds, tokens) for tokens in fed)

    def cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Measured seconds of the draft model's passes for a tree of `drafts` tokens."""
        if not drafts:
            return 0.0
        tree = self.tree
        if isinstance(tree, AutoTree):
            tree = StaticTree(search_best_tree([tree.acceptance], drafts, tree.depth))
        widths = [1, 2, 4, 8, 16, 32, 64]
        return self._drafting(
            measure_pass_costs(Speculative(1, self.model).small_model(model), condition, images, widths), tree
        )

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        """Grow the tree level by level.

        The draft model does not cache draft tokens: each level feeds the root and all expanded slots again. The first level
        also feeds the tokens committed since the last draft.
        """
        model, held = state.model, state.held

        def expand(frontier: Frontier) -> Tensor:
            if frontier.depth:
                logits = model.forward(frontier.fed, held, frontier.tree).logits[:, -frontier.tokens.shape[1] :]
            else:
                logits = self._catch_up(model, held, tokens, length)
            return to_probs(logits, state.sampling)

        shape = self.tree
        if state.choice is not None:
            parents = state.choice.next()
            if len(parents) == 1:
                return Draft.empty(len(tokens), model.vocab, tokens.device)
            shape = StaticTree(parents)
        assert not isinstance(shape, AutoTree)
        root = tokens.gather(1, length[:, None] - 1)[:, 0]
        return grow(expand, shape, self.drawing, root, Noise(state.seeds, length[:, None], step), state.total)

    def _catch_up(self, model: TokenModel, held: Any, tokens: Tensor, length: Tensor) -> Tensor:
        """Feed the newest committed tokens, after which everything before the root is in the cache.

        Returns the logits after the root, `[B, 1, V]`. A pass commits at most depth + 1 tokens.
        """
        W = self.tree.depth + 2
        start = (length - W).clamp(min=0)
        last, slots = Tree.of_chain(W - 1, tokens.device), torch.arange(W, device=tokens.device)
        model.rollback(held, start)
        logits = model.forward(tokens.gather(1, start[:, None] + slots), held, last).logits
        root = length - 1 - start
        model.commit(held, slots.expand(len(tokens), W), root, last)
        return logits.gather(1, root[:, None, None].expand(-1, 1, logits.shape[-1]))

    def observe(self, state: _State, step: Step) -> _State:
        """Update the controller.

        Draft tokens need no handling: the next proposal feeds what was committed.
        """
        if state.choice is not None:
            state.choice.observe(step, state.total)
        return state

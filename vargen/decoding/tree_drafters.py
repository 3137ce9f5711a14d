"""Drafters of trees, and the trained heads that propose them (EAGLE, Medusa).

A head is trained on the target's features, and gets those of the tokens that the last pass committed.

Shape suffixes: B slots of the engine, R rows of the target (B, times two with CFG), F slots of one level, K children of a
slot, A slots of an accepted path, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import AutoregressiveHead, Drafter, DraftHead, ParallelHeads, TokenModel
from vargen.decoding.noise import Noise
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, PassResult, Tree
from vargen.decoding.tree_growth import Children, DynamicTree, Frontier, grow_tree
from vargen.kernels.dispatch import is_eager_cpu
from vargen.values import short_repr


class TreeDrafter(Drafter):
    """Base class of drafters that propose a tree: frozen dataclasses with a field `shape`, and with `model` if one drafts.

    Attributes:
        model_class: that of `model`.
        children: how the children of a slot are chosen.
        rates: float32 `[K]`, see `grow_tree`; made by `bind`.
    """

    topology = "tree"
    provides: tuple[str, ...] = ("independent-per-pass",)
    shape: DynamicTree
    model: Any = None
    model_class: ClassVar[type] = TokenModel
    children: ClassVar[Children] = Children()
    rates: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.shape, DynamicTree):
            raise TypeError(f"shape must be a DynamicTree, got {short_repr(self.shape)}")
        if self.model is not None and not isinstance(self.model, self.model_class):
            raise TypeError(f"model must be of class {self.model_class.__name__} or None, got {short_repr(self.model)}")

    @property
    def width(self) -> int:
        return self.shape.nodes + 1

    def bind(self, model: TokenModel, slots: int) -> Self:
        """Return a copy for a model.

        Raises:
            ValueError: if the tree does not fit the grid, or a slot has more children than there are tokens.
        """
        if self.shape.children > model.vocab:
            raise ValueError(
                f"children of a tree must be at most the vocabulary of {model.vocab} tokens, got {self.shape.children}"
            )
        self.validate_grid(model.grid[0] * model.grid[1])
        return self.copy(rates=torch.tensor(self.shape.conditional_rates, dtype=torch.float32, device=model.device))

    def validate_grid(self, tokens: int) -> None:
        """Raise ValueError unless the longest path of the tree fits after the first token of a grid of `tokens` tokens."""
        if self.shape.depth >= tokens:
            raise ValueError(
                f"depth of a tree must be from 1 to {tokens - 1}, one less than the grid's tokens, got {self.shape.depth}"
            )

    def fit_to_grid(self, tokens: int, vocab: int | None = None) -> Self:
        shape, changed = self.shape, self
        if shape.depth >= tokens or shape.children > (vocab or shape.children):
            made: Any = self
            changed = replace(made, shape=shape.limit(tokens - 1, vocab))
        return changed

    def grow(self, expand: Callable[[Frontier], Tensor], state: TokenState, noise: Noise) -> Draft:
        """Grow a tree from the last committed token of each image; see `grow_tree`."""
        root = state.tokens.gather(1, state.length[:, None] - 1)[:, 0]
        return grow_tree(expand, self.shape, self.children, self.rates, root, noise, state.num_tokens)


@dataclass(frozen=True)
class HeadDrafter(TreeDrafter):
    """Draft trees with a draft head trained on the target's features.

    Args:
        shape: of the trees.
        model: the draft head. None: that of the target, which a pipeline has after `load_drafter`.
    """

    shape: DynamicTree = field(default_factory=DynamicTree)
    model: Any = None

    # Buffers, made by the first `reset`: the features that predicted the newest tokens [R, A, D], and their number [B].
    features: Tensor = field(init=False, repr=False, compare=False)
    count: Tensor = field(init=False, repr=False, compare=False)

    kind: ClassVar[str]  # name of the draft head in `TokenModel.draft_heads`
    model_class: ClassVar[type] = DraftHead

    def find_head(self, model: TokenModel) -> Any:
        """Return the draft head for `model`."""
        found = self.model or model.draft_heads.get(self.kind)
        if found is None:
            raise ValueError(self.missing_head_message())
        if (found.vocab, found.grid) != (model.vocab, model.grid):
            raise ValueError(
                f"the {self.kind} drafter must share the target's vocabulary and grid, {model.vocab} tokens on {model.grid}, "
                f"got {found.vocab} on {found.grid}"
            )
        return found

    def missing_head_message(self) -> str:
        """Error message for a model without a draft head."""
        return (
            f"this method needs a drafter trained for the model ({self.kind}), and this pipeline has none: train one with "
            f"`vargen train drafter {self.kind}`, then pipe.load_drafter(folder)"
        )

    def bind(self, model: TokenModel, slots: int) -> Self:
        count = torch.zeros(slots, dtype=torch.int64, device=model.device)
        return super().bind(model, slots).copy(model=self.find_head(model), count=count, features=None)

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        new, slots = require_features(first.features), len(state.seeds)
        if self.features is None:
            shape = (slots * (len(new) // len(rows)), self.shape.depth + 1, new.shape[2])
            self.keep(features=new.new_zeros(shape))
        cfg_rows = repeat_for_cfg(rows, slots, len(self.features))
        self.features[cfg_rows] = 0  # a product of 0 and what a failed image left, such as NaN, is NaN
        self.features[cfg_rows, :1] = new
        self.count[rows] = 1

    def observe(self, state: TokenState, result: PassResult) -> None:
        new = gather_slots(require_features(result.features), result.verdict.path)
        self.features[:, : new.shape[1]] = new
        self.count.copy_(result.count)


def repeat_for_cfg(rows: Tensor, slots: int, num_rows: int) -> Tensor:
    """Return the rows of the target, int64 `[k n]`, of slots `[n]`: those of all slots come first, then again of all slots."""
    return torch.cat([rows + first for first in range(0, num_rows, slots)])


def gather_slots(rows: Tensor, slots: Tensor) -> Tensor:
    """Gather features or logits `[R, A, D]` at slots `[B, n]` for all CFG rows: `[R, n, D]`."""
    index = slots.repeat(len(rows) // len(slots), 1)[..., None]
    return rows.gather(1, index.expand(-1, -1, rows.shape[2]))


def require_features(features: Tensor | None) -> Tensor:
    """Return the features of a pass."""
    if features is None:
        raise ValueError("draft heads need the model's features, and its passes return none")
    return features


@dataclass(frozen=True)
class Eagle(HeadDrafter):
    """EAGLE: a trained layer extrapolates the target's features token by token (Li et al. 2024, arXiv:2401.15077).

    The layer runs once over the tokens committed by the last pass, with the target's own features, and then once per further
    level of the draft, with its own features.
    """

    kind: ClassVar[str] = "eagle"
    model_class: ClassVar[type] = AutoregressiveHead

    cache: Any = field(init=False, repr=False, compare=False)  # made by `bind`, as the trees of `_catch_up`
    chains: Sequence[Tree] = field(init=False, repr=False, compare=False)

    def bind(self, model: TokenModel, slots: int) -> Self:
        bound, shape = super().bind(model, slots), self.shape
        chains = [Tree.make_chain(length, model.device) for length in range(shape.depth + 1)]
        return bound.copy(cache=bound.model.allocate(slots, max(shape.depth + 1, shape.num_expanded)), chains=chains)

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        super().reset(state, rows, condition, first)
        self.model.reset(self.cache, rows)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        level = Output(state.tokens, None)

        def expand(frontier: Frontier) -> Tensor:
            nonlocal level
            if frontier.depth:
                features = gather_slots(require_features(level.features), frontier.parent)
                level = self.model.forward(frontier.tokens, features, self.cache, frontier.tree)
            else:
                level = self._catch_up(state)
            return state.sampling.probs(level.logits)

        draft = self.grow(expand, state, noise)
        self.model.commit(self.cache, self.count.clamp(max=1))  # the root, after which the levels were fed
        return draft

    def _catch_up(self, state: TokenState) -> Output:
        """Feed the newest tokens with the target's features, and commit all of them except the root, where a draft starts.

        On a CPU it feeds as many slots as any image has new tokens; elsewhere always those of the longest path.

        Returns:
            Logits `[B, 1, V]` and features `[R, 1, D]` after the root.
        """
        A = max(int(self.count.max()), 1) if is_eager_cpu(self.count) else self.features.shape[1]
        place = (state.length - self.count)[:, None] + torch.arange(A, device=self.count.device)
        newest = state.tokens.gather(1, place.clamp(max=state.tokens.shape[1] - 1))
        out = self.model.forward(newest, self.features[:, :A], self.cache, self.chains[A - 1])
        last = (self.count - 1).clamp(min=0)  # a finished image has no new tokens
        self.model.commit(self.cache, last)
        return Output(gather_slots(out.logits, last[:, None]), gather_slots(require_features(out.features), last[:, None]))


@dataclass(frozen=True)
class Medusa(HeadDrafter):
    """Medusa: trained heads predict several tokens ahead from one feature of the target (Cai et al. 2024, arXiv:2401.10774).

    The feature is the one that predicted the root, so every pass already provides what the next draft needs. All slots of a
    level have the same q, because heads do not see each other's tokens. Trees are at most as deep as there are heads.
    """

    shape: DynamicTree = field(default_factory=lambda: DynamicTree(nodes=15, depth=3))
    kind: ClassVar[str] = "medusa"
    model_class: ClassVar[type] = ParallelHeads

    def bind(self, model: TokenModel, slots: int) -> Self:
        heads, shape = self.find_head(model).num_heads, self.shape
        if shape.depth <= heads:
            return super().bind(model, slots)
        raise ValueError(f"depth of a tree must be from 1 to the number of heads, {heads}, got {shape.depth}")

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        root = state.tokens.gather(1, state.length[:, None] - 1)[:, 0]
        last = gather_slots(self.features, (self.count - 1).clamp(min=0)[:, None])
        logits = self.model.forward(root, last, state.length - 1)[:, : self.shape.depth]
        probs = state.sampling.probs(logits)

        def expand(frontier: Frontier) -> Tensor:
            return probs[:, frontier.depth, None].expand(-1, frontier.tokens.shape[1], -1)

        return self.grow(expand, state, noise)

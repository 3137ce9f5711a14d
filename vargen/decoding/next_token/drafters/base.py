"""Base classes of drafters by the shape of their drafts: none at all, a chain, or a tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import Drafter, TokenModel
from vargen.decoding.next_token.trees.shapes import TreeShape, parse_shape
from vargen.decoding.noise import Noise
from vargen.decoding.sampling import Sampling
from vargen.decoding.tree import Draft, Output
from vargen.values import short_repr


@dataclass(frozen=True)
class Sequential(Drafter):
    """Empty draft: each pass feeds the last token and commits the next one."""

    @property
    def uses_probs(self) -> bool:
        return False

    @property
    def max_width(self) -> int:
        return 1

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> Draft:
        return Draft.make_empty(len(seeds), model.vocab, torch.device(model.device))

    def propose(self, state: Draft, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        return state


class ChainDrafter(Drafter):
    """Base class of drafters that propose a chain: frozen dataclasses with a field `length`, the draft tokens per pass."""

    length: int

    @property
    def max_width(self) -> int:
        return self.length + 1

    def validate_grid(self, tokens: int) -> None:
        """Raise ValueError unless the chain fits after the first token of a grid of `tokens` tokens."""
        if self.length >= tokens:
            raise ValueError(f"length must be from 1 to {tokens - 1}, one less than the grid's tokens, got {self.length}")

    def fit_to_grid(self, tokens: int) -> Self:
        changed: Any = self
        return replace(changed, length=tokens - 1) if self.length >= tokens else self


class TreeDrafter(Drafter):
    """Base class of drafters that propose a tree: frozen dataclasses with a field `shape`."""

    topology: str = "tree"
    shape: Any

    @property
    def tree_shape(self) -> TreeShape:
        """The shape, also if it was given by a name or by parents."""
        return parse_shape(self.shape)

    @property
    def max_width(self) -> int:
        return self.tree_shape.nodes + 1

    def bind(self, model: TokenModel) -> Self:
        """Return the drafter.

        Raises:
            ValueError: if the tree does not fit the grid, or a slot has more children than there are tokens.
        """
        tokens, children = model.grid[0] * model.grid[1], self.tree_shape.children
        if children > model.vocab:
            raise ValueError(f"children of a tree must be at most the vocabulary of {model.vocab} tokens, got {children}")
        self.validate_grid(tokens)
        return self

    def validate_grid(self, tokens: int) -> None:
        """Raise ValueError unless the longest path of the tree fits after the first token of a grid of `tokens` tokens."""
        depth = self.tree_shape.depth
        if depth >= tokens:
            raise ValueError(
                f"depth of a tree must be from 1 to {tokens - 1}, one less than the grid's tokens, got {short_repr(depth)}"
            )

    def fit_to_grid(self, tokens: int) -> Self:
        return self._with_shape(self.tree_shape.limit_depth(tokens - 1)) if self.tree_shape.depth >= tokens else self

    def fit_to_vocab(self, vocab: int) -> Self:
        return self._with_shape(self.tree_shape.limit_children(vocab)) if self.tree_shape.children > vocab else self

    def _with_shape(self, shape: TreeShape) -> Self:
        changed: Any = self
        return replace(changed, shape=shape)

"""No drafts: each pass feeds the last token and commits the next one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Output, Step
from vargen.decoding.next_token.protocols import TokenModel
from vargen.decoding.next_token.trees.shapes import AutoTree, TreeShape
from vargen.decoding.sampling import Sampling
from vargen.values import short_repr


@dataclass(frozen=True)
class Sequential:
    """Proposes nothing."""

    max_fed: int = 1
    topology: str = "chain"

    def bind(self, model: TokenModel) -> Sequential:
        return self

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> Draft:
        return Draft.empty(len(seeds), model.vocab, torch.device(model.device))

    def propose(self, state: Draft, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        return state

    def observe(self, state: Draft, step: Step) -> None:
        pass


class TreeDrafter:
    """A drafter, a frozen dataclass with a field `shape`, of which `tree` says what it stands for; see `SizedDrafter`."""

    @property
    @abstractmethod
    def tree(self) -> TreeShape | AutoTree:
        """The shape."""

    @property
    def max_fed(self) -> int:
        return self.tree.nodes + 1

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless the tree's longest path fits behind the first of so many tokens."""
        if self.tree.depth >= tokens and not isinstance(self.tree, AutoTree):  # which shrinks
            raise ValueError(
                f"depth of a tree must be from 1 to {tokens - 1}, one less than the grid's tokens, "
                f"got {short_repr(self.tree.depth)}"
            )

    def fitted(self, tokens: int) -> Self:
        """The drafter with a tree that fits behind the first of so many tokens."""
        return self._shaped(self.tree.cut(tokens - 1)) if self.tree.depth >= tokens else self

    def narrowed(self, vocab: int) -> Self:
        """The drafter with no more children of a slot than so many tokens."""
        return self._shaped(self.tree.narrowed(vocab)) if self.tree.children > vocab else self

    def resized(self, window: int | str) -> Self:
        """This drafter: windows are for chains of Jacobi drafts."""
        return self

    def _shaped(self, shape: Any) -> Self:
        changed: Any = self
        return replace(changed, shape=shape)

"""Base classes of drafters: `Sequential`, which proposes nothing, and `TreeDrafter`."""

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
    """Empty draft: each pass feeds the last token and commits the next one."""

    max_fed: int = 1
    topology: str = "chain"

    def bind(self, model: TokenModel) -> Sequential:
        return self

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> Draft:
        return Draft.empty(len(seeds), model.vocab, torch.device(model.device))

    def propose(self, state: Draft, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        return state

    def observe(self, state: Draft, step: Step) -> Draft:
        return state


class TreeDrafter:
    """Base class of tree drafters: frozen dataclasses with a field `shape`, which `tree` resolves; see `SizedDrafter`."""

    @property
    @abstractmethod
    def tree(self) -> TreeShape | AutoTree:
        """The resolved shape."""

    @property
    def max_fed(self) -> int:
        return self.tree.nodes + 1

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless the longest path of the tree fits after the first token of a grid of `tokens` tokens."""
        if self.tree.depth >= tokens and not isinstance(self.tree, AutoTree):  # automatic trees shrink
            raise ValueError(
                f"depth of a tree must be from 1 to {tokens - 1}, one less than the grid's tokens, "
                f"got {short_repr(self.tree.depth)}"
            )

    def fitted(self, tokens: int) -> Self:
        """Return the drafter with a tree that fits after the first token of a grid of `tokens` tokens."""
        return self._shaped(self.tree.cut(tokens - 1)) if self.tree.depth >= tokens else self

    def narrowed(self, vocab: int) -> Self:
        """Return the drafter with at most `vocab` children per slot."""
        return self._shaped(self.tree.narrowed(vocab)) if self.tree.children > vocab else self

    def resized(self, window: int | str) -> Self:
        """Return this drafter unchanged: windows apply only to Jacobi chains."""
        return self

    def _shaped(self, shape: Any) -> Self:
        changed: Any = self
        return replace(changed, shape=shape)

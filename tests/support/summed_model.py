"""A model of transformers that is small enough to sum the passes of a method over all drafts and outcomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vargen.decoding import Tree
from vargen.models.transformers.base import PromptRows
from vargen.models.transformers.decoding import TransformersTokenModel


class SummedModel(TransformersTokenModel):
    """A model as its loop sees it, for one prompt: its condition is the number of rows."""

    def __init__(self, model: TransformersTokenModel, condition: PromptRows):
        vars(self).update(vars(model))
        self.condition, self.tokens = condition, self.grid[0] * self.grid[1]

    def allocate(self, condition: torch.Tensor, width: int, slots: int | None = None) -> Any:  # type: ignore[override]
        return super().allocate(self.condition, width, len(condition) if slots is None else slots)

    def prefill(self, condition: torch.Tensor, state: Any, rows: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        return super().prefill(self.condition.repeat(len(condition)), state, rows)

    @torch.no_grad()
    def joint(self, condition: int, make_probs: Callable[[Any], Any]) -> torch.Tensor:
        images = torch.cartesian_prod(*[torch.arange(self.vocab)] * self.tokens)
        state, out = self.start(torch.zeros(len(images)), self.tokens)
        later = self.forward(images[:, :-1], state, Tree.make_chain(self.tokens - 2)).logits
        probs = make_probs(torch.cat([out.logits, later], 1)).double()
        return probs.gather(2, images[..., None])[..., 0].prod(1).view([self.vocab] * self.tokens)

"""Initial draft tokens of a Jacobi window, for positions that no pass has processed, and their probabilities.

Each function returns tokens int64 `[B, S]` for S consecutive positions per image, and the distributions they are sampled from,
float32 `[B, S, V]`, or `[1, 1, V]` if they are all equal. Results at positions that are not fresh are ignored.

Shape suffixes: B images, S positions, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.interfaces import LowResModel, TokenModel
from vargen.decoding.noise import Noise, Purpose


@dataclass(frozen=True)
class Context:
    """Inputs of an initial draft.

    Attributes:
        vocab, columns: V and the width of the grid.
        tokens: int64 `[B, M]`, by position: committed tokens, then older draft tokens of the window; undefined after that.
        known: int64 `[B]`, number of defined tokens, at least 1. Every fresh position is at or after it.
        last_probs: float32 `[B, V]`, target distribution at the last position that the window has processed; None before the
            first pass, and where probabilities are not computed (`Jacobi.uses_probs`).
        noise: noise at the S positions.
    """

    vocab: int
    columns: int
    tokens: Tensor
    known: Tensor
    last_probs: Tensor | None
    noise: Noise

    @property
    def uniform_probs(self) -> Tensor:
        return torch.full((1, 1, self.vocab), 1.0 / self.vocab, dtype=torch.float32, device=self.tokens.device)


InitialDraft = Callable[[Context], tuple[Tensor, Tensor]]


def draft_uniform(context: Context) -> tuple[Tensor, Tensor]:
    """Sample uniformly, with q = 1 / V. (Recording a one-hot q would be exact too, but is accepted far less often.)"""
    return context.noise.sample_evenly(context.vocab, Purpose.DRAFT), context.uniform_probs


MISSING_LOW_RES = "drafts from a low resolution need a model for it beside this one, and there is none"


def make_low_res_initial(model: LowResModel, state: Any) -> InitialDraft:
    """Return an initial draft that samples from a model's predictions, given the state with its low-resolution images."""
    last = model.grid[0] * model.grid[1] - 1

    def draft_low_res(context: Context) -> tuple[Tensor, Tensor]:
        probs = model.probs(state, context.tokens, context.known, context.noise.position.clamp(max=last))
        return context.noise.sample(probs, Purpose.DRAFT), probs

    return draft_low_res


def require_low_res_model(model: TokenModel) -> LowResModel:
    """Return the low-resolution model that comes with a target."""
    found = model.low_res
    if found is None:
        raise ValueError(MISSING_LOW_RES)
    if (found.vocab, found.grid) != (model.vocab, model.grid):
        raise ValueError(
            f"the low-resolution model must draft for {model.vocab} tokens on {model.grid}, got {found.vocab} on {found.grid}"
        )
    return found


INITIAL_DRAFTS: dict[str, InitialDraft] = {
    "uniform": draft_uniform,
    "low-res": draft_uniform,  # a placeholder: `Jacobi.propose` replaces it by the low-resolution draft
}

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

from vargen.decoding.next_token.protocols import LowResModel, TokenModel, UpscaledModel
from vargen.decoding.noise import Noise, Purpose


@dataclass(frozen=True)
class Context:
    """Inputs of an initial draft.

    Attributes:
        vocab, columns: V and the width of the grid.
        tokens: int64 `[B, M]`, by position: committed tokens, then older draft tokens of the window; undefined after that.
        known: int64 `[B]`, number of defined tokens, at least 1. Every fresh position is at or after it.
        last_probs: float32 `[B, V]`, target distribution at the last position that the window has processed; None before the
            first pass.
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
        return torch.full((1, 1, self.vocab), 1.0 / self.vocab, device=self.tokens.device)

    @property
    def left(self) -> Tensor:
        """int64 `[B, S]`: the last known token. After the first fresh position it is the nearest known token to the left."""
        return self.tokens.gather(1, self.known[:, None] - 1).expand_as(self.noise.position)

    @property
    def above(self) -> tuple[Tensor, Tensor]:
        """The token one row up, int64 `[B, S]`, and whether it is known."""
        up = self.noise.position - self.columns
        known = (up >= 0) & (up < self.known[:, None])
        return self.tokens.gather(1, torch.where(known, up, 0)), known


InitialDraft = Callable[[Context], tuple[Tensor, Tensor]]


def uniform(context: Context) -> tuple[Tensor, Tensor]:
    """Sample uniformly, with q = 1 / V. (Recording a one-hot q would be exact too, but is accepted far less often.)"""
    coin = context.noise.uniform(Purpose.DRAFT)
    return (coin * context.vocab).long().clamp_(max=context.vocab - 1), context.uniform_probs


def left(context: Context) -> tuple[Tensor, Tensor]:
    """Copy the token to the left."""
    return _copy(context.left, context.vocab)


def above(context: Context) -> tuple[Tensor, Tensor]:
    """Copy the token above; uniform where it is not known yet."""
    copied, known = context.above
    drawn, probs = uniform(context)
    tokens = torch.where(known, copied, drawn)
    return tokens, torch.where(known[..., None], _copy(tokens, context.vocab)[1], probs)


def previous(context: Context) -> tuple[Tensor, Tensor]:
    """Sample from the target distribution at the last position that the window has processed; uniform before the first pass.

    It uses the shared noise, so it often agrees with the token that this noise selects later.
    """
    if context.last_probs is None:
        return uniform(context)
    probs = context.last_probs[:, None].expand(-1, context.noise.position.shape[1], -1)
    return context.noise.draw(probs, Purpose.TOKEN), probs


def mixture(context: Context, weights: tuple[float, float, float, float] = (0.1, 0.25, 0.25, 0.4)) -> tuple[Tensor, Tensor]:
    """Sample from a mixture of uniform, left, above and previous, with the mixture as q.

    If a component is missing (no row above, no earlier pass), its weight goes to uniform.

    Args:
        weights: of the four components in this order, summing to 1.
    """
    even, west, north, last = weights
    above_token, known = context.above
    left_token = context.left
    north_weight = known * north
    base = context.uniform_probs.expand(len(left_token), 1, -1) * (even + (last if context.last_probs is None else 0.0))
    if context.last_probs is not None:
        base = base + last * context.last_probs[:, None]
    probs = base + (north - north_weight)[..., None] * context.uniform_probs
    probs = probs.scatter_add(2, left_token[..., None], torch.full_like(probs[..., :1], west))
    probs = probs.scatter_add(2, above_token[..., None], north_weight[..., None])
    return context.noise.draw(probs, Purpose.DRAFT), probs


def _copy(tokens: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    probs = torch.zeros(*tokens.shape, vocab, device=tokens.device)
    return tokens, probs.scatter_(2, tokens[..., None], 1.0)


MISSING_LOW_RES = "drafts from a low resolution need a model for it beside this one, and there is none"


def make_low_res_initial(model: LowResModel, state: Any) -> InitialDraft:
    """Return an initial draft that samples from a model's predictions, given the state with its low-resolution images."""
    last = model.grid[0] * model.grid[1] - 1

    def draft_low_res(context: Context) -> tuple[Tensor, Tensor]:
        probs = model.probs(state, context.tokens, context.known, context.noise.position.clamp(max=last))
        return context.noise.draw(probs, Purpose.DRAFT), probs

    return draft_low_res


def require_low_res_model(model: TokenModel) -> LowResModel:
    """Return the low-resolution model that comes with a target.

    Raises:
        ValueError: if there is none, or its vocabulary or grid differs.
    """
    found = model.low_res if isinstance(model, UpscaledModel) else None
    if found is None:
        raise ValueError(MISSING_LOW_RES)
    if (found.vocab, found.grid) != (model.vocab, model.grid):
        raise ValueError(
            f"the low-resolution model must draft for {model.vocab} tokens on {model.grid}, got {found.vocab} on {found.grid}"
        )
    return found


INITIAL_DRAFTS: dict[str, InitialDraft] = {
    "uniform": uniform,
    "left": left,
    "above": above,
    "previous": previous,
    "mixture": mixture,
    "low-res": uniform,  # placeholders: `Jacobi.propose` replaces these by the low-resolution draft
    "low-res-refreshed": uniform,
}
LOW_RES_DRAFTS = frozenset({"low-res", "low-res-refreshed"})

"""First drafts: what a Jacobi window proposes at positions that no pass has seen yet, and under which law.

Each returns tokens int64 `[B, S]` and their true law, for S consecutive positions per image, of which those where `fresh` is
False are not used: laws float32 `[B, S, V]`, or `[1, 1, V]` where all are alike.

Shape suffixes: B images, S positions, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose


@dataclass(frozen=True)
class Context:
    """What is known when first drafts are made.

    Attributes:
        vocab, columns: V and the width of the grid.
        tokens: int64 `[B, M]`, by position: committed tokens, then the window's older drafts; later entries are meaningless.
        known: int64 `[B]`, how many of them are meaningful, at least 1. Every fresh position is at or past it.
        last_law: float32 `[B, V]`, the target's law at the last position that the window has seen, or None before the first
            pass.
        noise: coins at the S positions.
    """

    vocab: int
    columns: int
    tokens: Tensor
    known: Tensor
    last_law: Tensor | None
    noise: Noise

    @property
    def uniform_law(self) -> Tensor:
        return torch.full((1, 1, self.vocab), 1.0 / self.vocab, device=self.tokens.device)

    @property
    def left(self) -> Tensor:
        """int64 `[B, S]`: the last known token; beyond the first fresh position the nearest on the left that is known."""
        return self.tokens.gather(1, self.known[:, None] - 1).expand_as(self.noise.position)

    @property
    def above(self) -> tuple[Tensor, Tensor]:
        """int64 `[B, S]`, the token one row up, and whether it is known."""
        up = self.noise.position - self.columns
        known = (up >= 0) & (up < self.known[:, None])
        return self.tokens.gather(1, torch.where(known, up, 0)), known


FirstDraft = Callable[[Context], tuple[Tensor, Tensor]]


def uniform(context: Context) -> tuple[Tensor, Tensor]:
    """Any token alike, with that as its law (a one-hot record would be exact too, and is accepted far less often)."""
    coin = context.noise.uniform(Purpose.DRAFT)
    return (coin * context.vocab).long().clamp_(max=context.vocab - 1), context.uniform_law


def left(context: Context) -> tuple[Tensor, Tensor]:
    """A copy of the token on the left."""
    return _copy(context.left, context.vocab)


def above(context: Context) -> tuple[Tensor, Tensor]:
    """A copy of the token above; uniform where there is none yet."""
    copied, known = context.above
    drawn, law = uniform(context)
    tokens = torch.where(known, copied, drawn)
    return tokens, torch.where(known[..., None], _copy(tokens, context.vocab)[1], law)


def previous(context: Context) -> tuple[Tensor, Tensor]:
    """A draw from the target's law at the last position that the window has seen; uniform before the first pass.

    It is drawn with the image's own noise, so it agrees often with what that noise draws later.
    """
    if context.last_law is None:
        return uniform(context)
    law = context.last_law[:, None].expand(-1, context.noise.position.shape[1], -1)
    return context.noise.draw(law, Purpose.TOKEN), law


def mixture(context: Context, weights: tuple[float, float, float, float] = (0.1, 0.25, 0.25, 0.4)) -> tuple[Tensor, Tensor]:
    """A mixture of uniform, left, above and previous, recorded as the mixture it is.

    Where a part is missing (no row above, no earlier pass) its weight goes to uniform.

    Args:
        weights: of the four, in this order, summing to 1.
    """
    even, west, north, last = weights
    above_token, known = context.above
    left_token = context.left
    north_weight = known * north
    base = context.uniform_law.expand(len(left_token), 1, -1) * (even + (last if context.last_law is None else 0.0))
    if context.last_law is not None:
        base = base + last * context.last_law[:, None]
    law = base + (north - north_weight)[..., None] * context.uniform_law
    law = law.scatter_add(2, left_token[..., None], torch.full_like(law[..., :1], west))
    law = law.scatter_add(2, above_token[..., None], north_weight[..., None])
    return context.noise.draw(law, Purpose.DRAFT), law


def _copy(tokens: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    law = torch.zeros(*tokens.shape, vocab, device=tokens.device)
    return tokens, law.scatter_(2, tokens[..., None], 1.0)


FIRST_DRAFTS: dict[str, FirstDraft] = {
    "uniform": uniform,
    "left": left,
    "above": above,
    "previous": previous,
    "mixture": mixture,
}

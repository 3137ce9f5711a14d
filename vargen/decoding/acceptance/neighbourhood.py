"""Neighbourhood acceptance (LANTERN): a draft is judged by the mass of the tokens that look like it.

Shape suffixes: B images, S drafts, K neighbours, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vargen.decoding.acceptance.exact import probability
from vargen.decoding.acceptance.neighbours import codebook_of, nearest_tokens
from vargen.decoding.acceptance.relaxation import Relaxed
from vargen.decoding.protocols import TokenModel
from vargen.values import real, shown, whole


@dataclass(frozen=True)
class Neighbourhood(Relaxed):
    """Relaxed: a draft x is accepted while u < (p(x) + p(A)) / q(x), A the tokens whose codes are nearest to that of x.

    LANTERN (Jang et al. 2024, section 4) and LANTERN++ (Park et al. 2025). A is the longest prefix of the `size` nearest
    tokens, x itself not among them, whose mass p(A) stays within the bounds that are set: `delta` (LANTERN), (ratio - 1) p(x)
    (LANTERN++), so that what x counts for is at most `ratio` p(x). The draft itself is kept, and a refusal draws
    norm((p - q)+), which is the optimal residual of every relaxed rule (see `relaxation`). Neither bound limits how far the
    output is from p in sum, because every draft has an A of its own: that is what is reported, and what `budget` is for.
    A draft that the filters leave without probability is never accepted, whatever its neighbours have.

    Where drawing is greedy (temperature 0), masses are those at temperature 1, and a draft is accepted if p(x) + p(A) is at
    least the probability of the likeliest other token (LANTERN's greedy form). Each such token that is not the likeliest itself
    counts as a relaxation of one.

    Args:
        size: most neighbours, 1 or more; where the codebook has fewer, all.
        ratio: lambda, above 1, or None for no such bound.
        delta: in (0, 1], or None for no such bound.
        budget, tightening: see `Relaxed`.

    Raises:
        ValueError: for values outside these ranges, or if neither bound is set.
    """

    size: int = 10
    ratio: float | None = 5.0
    delta: float | None = None
    nearest: Tensor | None = field(default=None, init=False, repr=False, compare=False)  # int16 or int32 `[V, K]`, by `bind`

    def __post_init__(self) -> None:
        super().__post_init__()
        size, ratio, delta = whole(self.size, 1), real(self.ratio), real(self.delta)
        if size is None:
            raise ValueError(f"size, most neighbours of a token, must be a whole number of at least 1, got {shown(self.size)}")
        if self.ratio is not None and (ratio is None or ratio <= 1):
            raise ValueError(f"ratio must be above 1, or None to bound by delta alone, got {shown(self.ratio)}")
        if self.delta is not None and (delta is None or not 0 < delta <= 1):
            raise ValueError(f"delta must be in (0, 1], or None to bound by ratio alone, got {shown(self.delta)}")
        if ratio is None and delta is None:
            raise ValueError("a neighbourhood needs a bound of its mass: ratio, delta or both, got None for both")
        for name, value in (("size", size), ("ratio", ratio), ("delta", delta)):
            object.__setattr__(self, name, value)

    def bind(self, model: TokenModel) -> Neighbourhood:
        """This rule with the neighbours in the model's codebook, which are made the first time.

        Raises:
            ValueError: if the model has no codebook, or one that is none.
        """
        bound = replace(self)
        object.__setattr__(bound, "nearest", nearest_tokens(codebook_of(model), self.size))
        return bound

    def mass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p(A) of `tokens` `[B, S]` under p `[B, S, V]`: float `[B, S]`."""
        if self.nearest is None:
            raise ValueError("this rule is bound to no model: call bind(model) first")
        reached = p.gather(2, self.nearest[tokens].long()).cumsum(2)
        within = torch.ones_like(reached, dtype=torch.bool)
        if self.ratio is not None:
            within &= reached <= (self.ratio - 1) * probability(p, tokens)[..., None]
        if self.delta is not None:
            within &= reached <= self.delta
        return (reached * within).amax(2)

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        own_p, own_q = probability(p, tokens), probability(q, tokens)
        return torch.where(own_p > 0, (own_p + self.mass(p, tokens)) / own_q.clamp_min(1e-30), 0.0)

    def wanted_greedily(self, p: Tensor, q: Tensor | None, tokens: Tensor, soft: Tensor) -> Tensor:
        own = probability(soft, tokens)
        others = soft.scatter(2, tokens[..., None], 0.0).amax(2)
        return ((own > 0) & (own + self.mass(soft, tokens) >= others)).to(p.dtype)

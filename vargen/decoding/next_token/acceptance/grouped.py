"""GroupedRule speculative decoding (GSD): a draft is judged by the mass of the tokens around it.

Shape suffixes: B images, T fed tokens of one pass, G members of a group, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vargen.decoding.next_token.acceptance import fused
from vargen.decoding.next_token.acceptance.exact import probability
from vargen.decoding.next_token.acceptance.relaxed import RelaxedRule
from vargen.decoding.next_token.protocols import TokenModel
from vargen.values import parse_float, parse_int, short_repr


@dataclass(frozen=True)
class GroupedRule(RelaxedRule):
    """RelaxedRule: a draft is judged by the mass of a group of tokens around it instead of by its own.

    GroupedRule speculative decoding (So et al. 2025, GSD, section 3): the `size` tokens whose probabilities under the present
    p are nearest in rank to the draft's, half of them above and half below, less those that differ by `delta` or more in
    probability or by `distance` or more in code. Accepts while u < min(1, sum p / sum q) over draft and group, keeps the draft
    itself, and draws norm((p - q)+) at a refusal. The output does not follow the target: each acceptance granted beyond
    min(1, p / q) is relaxation, reported per image. The sums can also fall *below* p / q; then p / q counts, because refusing
    more would bias the output for nothing. Tokens that the filters leave without probability join no group.

    Args:
        size: most tokens in a group besides the draft, 1 or more.
        delta: in (0, 1]; 1 switches this filter off.
        distance: squared Euclidean distance of codebook vectors (unit vectors: 0 to 4); None switches this filter off.
        budget, tightening: see `RelaxedRule`.

    Raises:
        ValueError: for values outside these ranges.
    """

    size: int = 14
    delta: float = 0.15
    distance: float | None = None
    codebook: Tensor | None = field(default=None, init=False, repr=False, compare=False)  # `[V, C]`, which `bind` sets

    def __post_init__(self) -> None:
        super().__post_init__()
        size, delta, distance = parse_int(self.size, 1), parse_float(self.delta), parse_float(self.distance)
        if size is None:
            raise ValueError(f"size, the tokens of a group, must be a whole number of at least 1, got {short_repr(self.size)}")
        if delta is None or not 0 < delta <= 1:
            raise ValueError(
                f"delta must be in (0, 1], where 1 groups whatever the probabilities, got {short_repr(self.delta)}"
            )
        if self.distance is not None and (distance is None or not distance > 0):
            raise ValueError(f"distance must be above 0, or None to group whatever the codes, got {short_repr(self.distance)}")
        for name, value in (("size", size), ("delta", delta), ("distance", distance)):
            object.__setattr__(self, name, value)

    def bind(self, model: TokenModel) -> GroupedRule:
        """This rule with the model's codebook.

        Raises:
            ValueError: if `distance` is set and the model has none.
        """
        if self.distance is not None and model.codebook is None:
            raise ValueError("distance needs a model with a codebook; pass distance=None to group whatever the codes")
        bound = replace(self)
        object.__setattr__(bound, "codebook", model.codebook)
        return bound

    def members(self, p: Tensor, tokens: Tensor) -> Tensor:
        """int64 `[B, T - 1, G]` groups of `tokens` `[B, T - 1]` under `p`; the draft itself stands for who is left out."""
        own = p.gather(2, tokens[..., None])
        others = p.scatter(2, tokens[..., None], -1.0)
        below = min((self.size + 1) // 2, p.shape[-1] - 1)
        above = min(self.size // 2, p.shape[-1] - 1)
        low, index = torch.where(others <= own, others, -1.0).topk(below, dim=2)
        high, higher = torch.where(others > own, -others, -2.0).topk(above, dim=2)  # the smallest of the larger
        value, member = torch.cat([low, -high], 2), torch.cat([index, higher], 2)
        joins = (value > 0) & (value <= 1) & ((value - own).abs() < self.delta)
        if self.distance is not None and self.codebook is not None:
            gap = self.codebook[member] - self.codebook[tokens][..., None, :]
            joins &= gap.square().sum(-1) < self.distance
        return torch.where(joins, member, tokens[..., None])

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        if fused.applies(p):
            from vargen.kernels.accept_wanted import grouped_accept_prob

            codes = self.codebook.float().t() if self.distance is not None and self.codebook is not None else None
            return grouped_accept_prob(p, q, tokens, self.size, self.delta, self.distance, codes)
        member = self.members(p, tokens)
        joined = member != tokens[..., None]
        group_p = probability(p, tokens) + (p.gather(2, member) * joined).sum(2)
        group_q = probability(q, tokens)
        if q is not None:
            group_q = group_q + (q.gather(2, member) * joined).sum(2)
        return torch.where(group_q > 0, group_p / group_q, 0.0)

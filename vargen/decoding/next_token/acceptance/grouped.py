"""Grouped speculative decoding (GSD): verify a draft token by the total probability of a group of tokens around it.

Shape suffixes: B images, T tokens fed in one pass, G members of a group, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.acceptance.exact import gather_prob
from vargen.decoding.next_token.acceptance.relaxed import RelaxedRule
from vargen.values import number_field


@dataclass(frozen=True)
class GroupedRule(RelaxedRule):
    """Relaxed rule of GSD: accept a draft token by the total probability of its group instead of its own probability.

    Grouped speculative decoding (So et al. 2025, GSD, section 3). The group consists of the `size` tokens nearest in rank to
    the draft token when sorted by the current p, half above and half below it. Tokens that differ by `delta` or more in
    probability, or by `distance` or more in codebook space, are excluded, as are tokens that the sampling filters set to
    probability zero.

    The draft token is accepted if u < min(1, sum p / sum q), summed over the token and its group; it is committed unchanged. A
    rejection samples from norm((p - q)+). The output is not distributed as the target: acceptance probability beyond min(1, p /
    q) is relaxation, reported per image. Where the ratio of sums is *below* p / q, we use p / q, because rejecting more than
    the exact rule would add bias for no gain.

    Args:
        size: maximum number of tokens in a group besides the draft token, at least 1.
        delta: in (0, 1]; 1 disables this filter.
        distance: squared Euclidean distance of codebook vectors (0 to 4 for unit vectors); None disables this filter.
        budget, tightening: see `RelaxedRule`.

    Raises:
        ValueError: if a value is out of range.
    """

    size: int = number_field(14, 1, is_integer=True, meaning="the number of tokens in a group")
    delta: float = number_field(0.15, 0, 1, open_below=True)
    distance: float | None = number_field(None, 0, open_below=True, optional=True)
    codebook: Tensor | None = field(default=None, init=False, repr=False, compare=False)  # `[V, C]`, set by `bind`

    def bind(self, model: TokenModel) -> GroupedRule:
        """Return the rule with the model's codebook.

        Raises:
            ValueError: if `distance` is set and the model has no codebook.
        """
        if self.distance is not None and model.codebook is None:
            raise ValueError("distance needs a model with a codebook; distance=None groups tokens without it")
        bound = replace(self)
        object.__setattr__(bound, "codebook", model.codebook)
        return bound

    def group_members(self, p: Tensor, tokens: Tensor) -> Tensor:
        """int64 `[B, T - 1, G]`: the groups of `tokens` `[B, T - 1]` under `p`.

        Excluded members are replaced by the draft token itself.
        """
        own = p.gather(2, tokens[..., None])
        others = p.scatter(2, tokens[..., None], -1.0)
        below = min((self.size + 1) // 2, p.shape[-1] - 1)
        above = min(self.size // 2, p.shape[-1] - 1)
        low, index = torch.where(others <= own, others, -1.0).topk(below, dim=2)
        high, higher = torch.where(others > own, -others, -2.0).topk(above, dim=2)  # the smallest above own
        value, member = torch.cat([low, -high], 2), torch.cat([index, higher], 2)
        joins = (value > 0) & (value <= 1) & ((value - own).abs() < self.delta)
        if self.distance is not None and self.codebook is not None:
            gap = self.codebook[member] - self.codebook[tokens][..., None, :]
            joins &= gap.square().sum(-1) < self.distance
        return torch.where(joins, member, tokens[..., None])

    def accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        member = self.group_members(p, tokens)
        joined = member != tokens[..., None]
        group_p = gather_prob(p, tokens) + (p.gather(2, member) * joined).sum(2)
        group_q = gather_prob(q, tokens)
        if q is not None:
            group_q = group_q + (q.gather(2, member) * joined).sum(2)
        return torch.where(group_q > 0, group_p / group_q, 0.0)

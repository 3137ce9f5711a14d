"""Relaxed acceptance rules: those of GSD, LANTERN and MuLo-SD, over one implementation of relaxation.

Relaxation is acceptance beyond the exact probability min(1, p / q). A relaxed rule specifies the probability f(x) with which it
accepts draft token x. The base class spends the excess f(x) - min(1, p(x) / q(x)) where it is positive, tapers it with depth,
limits it by the budget, and sums it.

Where f is at least the exact acceptance probability, (p - q f)+ equals (p - q)+, so the residual of the exact rule is optimal
for every relaxed rule. The total variation between the output of one step and p is then exactly the excess acceptance, the sum
over x of q(x) (f(x) - min(1, p / q)), for any rule. Relaxed rules of equal relaxation are therefore equally far from p and
differ only in the direction.

Shape suffixes: B images, T tokens fed in one pass, S draft tokens, G members of a group, K neighbors, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import AcceptanceRule, TokenModel
from vargen.decoding.neighbors import build_neighbor_table, require_codebook
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.rules import gather_prob, resample_rejected, verify_chain
from vargen.decoding.tree import Draft, Verdict
from vargen.decoding.tree_rules import DraftTokens, SiblingDecision, verify_siblings
from vargen.kernels import ops
from vargen.values import number_field


@dataclass(frozen=True, kw_only=True)
class RelaxedRule(AcceptanceRule):
    """Base class of relaxed rules. A subclass defines `accept_prob`, its acceptance probability for a draft token.

    Args:
        budget: maximum relaxation per image, at least 0; once it is spent, the rule is exact. None: no limit.
        tightening: nu, at least 0. Draft token i of a path, counted from 0, gets exp(-nu i) of the relaxation, so early tokens
            are verified loosely and late ones tightly (the schedule of Cool-SD, where nu is 0.7). Late tokens are reached less
            often, so relaxation gains less there. 0: no tapering.

    Raises:
        ValueError: if a value is out of range.
    """

    exact = False
    topologies = (*AcceptanceRule.topologies, "tree")

    budget: float | None = number_field(None, 0, optional=True, meaning="the maximum relaxation per image")
    tightening: float = number_field(0.0, 0)

    def accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        """Probability f of accepting each draft token of `tokens` `[B, S]`, clamped to between the exact probability and 1.

        Args:
            p, q: float32 `[B, S, V]`, target and draft distributions; q is None for a deterministic proposal.
        """
        raise NotImplementedError

    def greedy_accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor, unfiltered_probs: Tensor) -> Tensor:
        """Like `accept_prob`, for greedy sampling, where p is one-hot. Rules without a greedy form use p.

        Args:
            unfiltered_probs: float32 `[B, S, V]`, the target distribution at temperature 1.
        """
        return self.accept_prob(p, q, tokens)

    def _accept_by_image(self, drafted: DraftTokens) -> Tensor:
        """Return `accept_prob`, and `greedy_accept_prob` of the images that are sampled greedily, `[B, S]`."""
        accept_prob = self.accept_prob(*drafted[:3])
        if drafted.unfiltered_probs is None or drafted.is_greedy is None:
            return accept_prob
        greedy = self.greedy_accept_prob(*drafted[:3], drafted.unfiltered_probs)
        return torch.where(drafted.is_greedy[:, None], greedy, accept_prob)

    def relaxation(self, drafted: DraftTokens) -> Tensor:
        """Relaxation of each draft token, `[B, S]`, tapered with depth but not yet limited by the budget."""
        excess = (self._accept_by_image(drafted).clamp(max=1.0) - drafted.exact_accept_prob).clamp_min(0)
        return excess * (-self.tightening * (drafted.depth - 1)).exp() if self.tightening else excess

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        """See `AcceptanceRule`; `relaxation` counts toward the budget.

        A later sibling is tested against the p that remains after the rejection of earlier siblings.
        """
        if not draft.tree.is_chain:
            return verify_siblings(self._decide, probs, draft, noise, relaxation, self.budget)
        if type(self).relaxation is RelaxedRule.relaxation and draft.tokens.shape[1]:
            limits = {"relaxation": relaxation, "budget": self.budget, "tightening": self.tightening}
            accept_prob = partial(self._accept_by_image, _select_chain(probs, draft))
            if (found := ops.verify_chain(probs, draft, noise, accept_prob, **limits)) is not None:
                return Verdict(*found)
        verdict, _, spent = self.verify_chain(probs, draft, noise, relaxation)
        return replace(verdict, relaxation=sum_relaxation(spent, verdict, draft))

    def _decide(self, child: DraftTokens) -> SiblingDecision:
        return SiblingDecision(child.exact_accept_prob, relaxation=self.relaxation(child))

    def verify_chain(
        self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor
    ) -> tuple[Verdict, DraftTokens, Tensor]:
        """Return the verdict on a chain without its relaxation, the draft tokens, and the relaxation of each, `[B, T - 1]`.

        Invalid draft tokens get none, and the sum along the chain does not exceed what is left of the budget.
        """
        drafted = _select_chain(probs, draft)
        spent = self.relaxation(drafted)
        if draft.valid is not None:
            spent = torch.where(draft.valid, spent, 0.0)  # past the grid, logits may be NaN
        if self.budget is not None:
            total = torch.minimum(spent.cumsum(1), (self.budget - relaxation).clamp_min(0)[:, None])
            spent = total.diff(dim=1, prepend=torch.zeros_like(total[:, :1]))
        accepted = noise.uniform(Purpose.ACCEPT)[:, :-1] < drafted.exact_accept_prob + spent
        return verify_chain(accepted, probs, draft, noise), drafted, spent


def _select_chain(probs: Tensor, draft: Draft) -> DraftTokens:
    """Return the draft tokens of a chain: S = T - 1."""
    unfiltered = None if draft.unfiltered_probs is None else draft.unfiltered_probs[:, :-1]
    return DraftTokens(probs[:, :-1], draft.probs, draft.tokens, draft.tree.depth[1:], unfiltered, draft.is_greedy)


def sum_relaxation(spent: Tensor, verdict: Verdict, draft: Draft) -> Tensor:
    """Relaxation of a pass, float `[B]`: the sum over the draft tokens that were tested, including the first rejected one."""
    tested = torch.arange(spent.shape[1], device=spent.device) < verdict.count[:, None]
    return (spent * draft.only_valid(tested)).sum(1)


@dataclass(frozen=True)
class GroupedRule(RelaxedRule):
    """Relaxed rule of GSD: accept a draft token by the total probability of its group instead of its own probability.

    Grouped speculative decoding (So et al. 2025, GSD, section 3). The group consists of the `size` tokens nearest in rank to
    the draft token when sorted by the current p, half above and half below it. Tokens that differ by `delta` or more in
    probability, or by `distance` or more in codebook space, are excluded, as are tokens that the sampling filters set to
    probability zero. The draft token is accepted, and committed unchanged, if u < min(1, sum p / sum q), summed over the token
    and its group. Where this is below the exact probability, we use the exact one: rejecting more adds bias for no gain.

    Args:
        size: maximum number of tokens in a group besides the draft token, at least 1.
        delta: in (0, 1]; 1 disables this filter.
        distance: squared Euclidean distance of codebook vectors (0 to 4 for unit vectors); None disables this filter.
        budget, tightening: see `RelaxedRule`.
    """

    size: int = number_field(14, 1, is_integer=True, meaning="the number of tokens in a group")
    delta: float = number_field(0.15, 0, 1, open_below=True)
    distance: float | None = number_field(None, 0, open_below=True, optional=True)
    codebook: Tensor | None = field(default=None, init=False, repr=False, compare=False)  # `[V, C]`, set by `bind`

    def bind(self, model: TokenModel) -> Self:
        if self.distance is not None and model.codebook is None:
            raise ValueError("distance needs a model with a codebook; distance=None groups tokens without it")
        return self.copy(codebook=model.codebook)

    def group_members(self, p: Tensor, tokens: Tensor) -> Tensor:
        """int64 `[B, T - 1, G]`: the groups of `tokens` `[B, T - 1]` under `p`.

        Excluded members are replaced by the draft token itself.
        """
        own, most = p.gather(2, tokens[..., None]), p.shape[-1] - 1
        others = p.scatter(2, tokens[..., None], -1.0)
        # Values outside (0, 1] mark tokens that are on the other side of the draft token.
        low, lower = torch.where(others <= own, others, -1.0).topk(min((self.size + 1) // 2, most), dim=2)
        high, higher = torch.where(others > own, -others, -2.0).topk(min(self.size // 2, most), dim=2)  # the smallest above own
        value, member = torch.cat([low, -high], 2), torch.cat([lower, higher], 2)
        joins = (value > 0) & (value <= 1) & ((value - own).abs() < self.delta)
        if self.distance is not None:
            assert self.codebook is not None, "call bind(model) first"
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


@dataclass(frozen=True)
class NeighborhoodRule(RelaxedRule):
    """Relaxed rule of LANTERN: accept x if u < (p(x) + p(A)) / q(x), A being the nearest neighbors of x in the codebook.

    LANTERN (Jang et al. 2024, section 4) and LANTERN++ (Park et al. 2025). A is the longest prefix of the `size` nearest
    tokens, excluding x, whose total probability p(A) stays within the configured bounds: `delta` (LANTERN), and (ratio - 1)
    p(x) (LANTERN++), which limits p(x) + p(A) to `ratio` p(x). An accepted draft token is committed unchanged. Neither bound
    limits the total distance of the output from p, because every draft token has its own A; that distance is reported as
    relaxation and limited by `budget`. A draft token that the filters set to probability zero is never accepted, whatever its
    neighbors.

    Under greedy sampling (temperature 0), probabilities are taken at temperature 1, and a draft token is accepted if p(x) +
    p(A) is at least the largest probability of any other token (LANTERN's greedy form). Each accepted token that is not the
    argmax counts as a relaxation of one.

    Args:
        size: maximum number of neighbors, at least 1; limited by the size of the codebook.
        ratio: lambda, above 1; None disables this bound.
        delta: in (0, 1]; None disables this bound. At least one of the two must be set.
        budget, tightening: see `RelaxedRule`.
    """

    size: int = number_field(10, 1, is_integer=True, meaning="the maximum number of neighbors")
    ratio: float | None = number_field(5.0, 1, open_below=True, optional=True)
    delta: float | None = number_field(None, 0, 1, open_below=True, optional=True)
    neighbor_table: Tensor = field(init=False, repr=False, compare=False)  # int32 `[V, K]`, set by `bind`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio is None and self.delta is None:
            raise ValueError("ratio, delta or both must be a number, which bounds the neighborhood, got None for both")

    def bind(self, model: TokenModel) -> Self:
        return self.copy(neighbor_table=build_neighbor_table(require_codebook(model), self.size))

    def neighbor_prob(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Total neighbor probability p(A) of `tokens` `[B, S]` under p `[B, S, V]`: float `[B, S]`."""
        reached = p.gather(2, self.neighbor_table[tokens].long()).cumsum(2)
        within = torch.ones_like(reached, dtype=torch.bool)
        if self.ratio is not None:
            within &= reached <= (self.ratio - 1) * gather_prob(p, tokens)[..., None]
        if self.delta is not None:
            within &= reached <= self.delta
        return (reached * within).amax(2)

    def accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        own_p, own_q = gather_prob(p, tokens), gather_prob(q, tokens)
        return torch.where(own_p > 0, (own_p + self.neighbor_prob(p, tokens)) / own_q.clamp_min(1e-30), 0.0)

    def greedy_accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor, unfiltered_probs: Tensor) -> Tensor:
        own = gather_prob(unfiltered_probs, tokens)
        others = unfiltered_probs.scatter(2, tokens[..., None], 0.0).amax(2)
        return ((own > 0) & (own + self.neighbor_prob(unfiltered_probs, tokens) >= others)).to(p.dtype)


@dataclass(frozen=True)
class PooledRule(RelaxedRule):
    """Relaxed rule of MuLo-SD: accept a draft token if it and its `size` nearest codebook neighbors sum to p >= `threshold`.

    MuLo-SD 2026, arXiv 2601.05149. Two differences from the paper avoid needless bias. (1) Below the threshold we apply the
    exact test min(1, p / q) instead of rejecting. (2) After the first rejection, MuLo keeps the draft tokens that pass and
    resamples the others. Here this is a coupling: a draft token that was not reached is kept with the probability that the rule
    gives it, otherwise resampled from norm((p - q)+), so it is distributed as p except for the relaxation spent. Relaxation is
    counted where it is spent, also on draft tokens that were not reached.

    Draft tokens within `radius` rows and columns of a rejected token, and after it in raster order, are resampled from p
    whether they pass or not (the paper's local expansion). Tokens before it are left alone: their p does not depend on it, and
    letting a later token decide about an earlier one would bias the output.

    Args:
        size: number of neighbors, at least 0; limited by the size of the codebook.
        threshold: tau, above 0; above 1 no token passes by its pooled probability.
        radius: at least 0.
        budget, tightening: see `RelaxedRule`. With a budget of 0 this is the exact rule with a maximal coupling.
    """

    topologies = ("chain",)

    size: int = number_field(10, 0, is_integer=True, meaning="the number of neighbors")
    threshold: float = number_field(0.3, 0, open_below=True)
    radius: int = number_field(0, 0, is_integer=True)
    neighbor_table: Tensor | None = field(default=None, init=False, repr=False, compare=False)  # `[V, K]`, set by `bind`
    columns: int = field(default=0, init=False, repr=False, compare=False)  # of the grid, set by `bind`

    def bind(self, model: TokenModel) -> Self:
        needs_table = self.size and self.threshold <= 1
        table = build_neighbor_table(require_codebook(model), self.size) if needs_table else None
        return self.copy(columns=model.grid[1], neighbor_table=table)

    def accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        pooled = gather_prob(p, tokens)
        if self.neighbor_table is not None:
            pooled = pooled + p.gather(2, self.neighbor_table[tokens].long()).sum(2)
        return (pooled >= self.threshold).to(p.dtype)

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        """See `AcceptanceRule`. `Verdict.sampled` holds the draft tokens, with rejected ones replaced."""
        verdict, drafted, spent = self.verify_chain(probs, draft, noise, relaxation)
        accepted = noise.uniform(Purpose.RESAMPLE_ACCEPT)[:, :-1] < drafted.exact_accept_prob + spent
        accepted = draft.only_valid(accepted)
        near = torch.zeros_like(accepted)  # undefined for committed tokens
        if self.radius:
            index = torch.arange(spent.shape[1], device=spent.device)
            first = verdict.count[:, None] - 1  # the draft token that the verdict, with other uniforms, rejected
            rejected = draft.only_valid((index == first) | ((index > first) & ~accepted))
            near = self._is_near_rejected(rejected, noise.position[:, :-1]) & (index > first)
        sampled = resample_rejected(probs, draft, noise, accepted, near)
        return replace(verdict, sampled=sampled, relaxation=(spent * ~near).sum(1))

    def _is_near_rejected(self, rejected: Tensor, position: Tensor) -> Tensor:
        """bool `[B, S]`: positions after a rejected one in raster order, within `radius` rows and columns of it."""
        row, column = position // self.columns, position % self.columns
        down = row[:, :, None] - row[:, None, :]  # from one to another
        across = column[:, :, None] - column[:, None, :]
        after = position[:, :, None] > position[:, None, :]
        return (after & (down <= self.radius) & (across.abs() <= self.radius) & rejected[:, None, :]).any(2)

"""Relaxation: acceptance beyond the exact probability min(1, p / q), implemented once for all relaxed rules.

A relaxed rule specifies the probability f(x) with which it accepts draft token x. The base class spends the excess f(x)
- min(1, p(x) / q(x)) where it is positive, tapers it with depth, limits it by the budget, and sums it.

Where f is at least the exact acceptance probability, (p - q f)+ equals (p - q)+, so the residual of the exact rule is optimal
for every relaxed rule. The total variation between the output of one step and p is then exactly the excess acceptance, the sum
over x of q(x) (f(x) - min(1, p / q)), for any rule. Relaxed rules of equal relaxation are therefore equally far from p and
differ only in the direction.

Shape suffixes: B images, T tokens fed in one pass, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vargen.decoding.interfaces import AcceptanceRule
from vargen.decoding.next_token.acceptance import fused
from vargen.decoding.next_token.acceptance.exact import verify_chain
from vargen.decoding.next_token.acceptance.siblings import SiblingDecision, Siblings, verify_siblings
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.tree import Draft, Tree, Verdict
from vargen.values import number_field, validate_fields


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

    def __post_init__(self) -> None:
        validate_fields(self)

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

    def _accept_by_row(
        self, p: Tensor, q: Tensor | None, tokens: Tensor, unfiltered_probs: Tensor | None, is_greedy: Tensor | None
    ) -> Tensor:
        """Return `accept_prob`, and `greedy_accept_prob` of the images that are sampled greedily."""
        accept_prob = self.accept_prob(p, q, tokens)
        if unfiltered_probs is None or is_greedy is None:
            return accept_prob
        return torch.where(is_greedy[:, None], self.greedy_accept_prob(p, q, tokens, unfiltered_probs), accept_prob)

    def relaxation(self, siblings: Siblings, depth: Tensor) -> Tensor:
        """Relaxation of each draft token, `[B, S]`, tapered with depth but not yet limited by the budget."""
        given = (siblings.p, siblings.q, siblings.token)
        accept_prob = self._accept_by_row(*given, siblings.unfiltered_probs, siblings.is_greedy)
        excess = (accept_prob.clamp(max=1.0) - siblings.exact_accept_prob).clamp_min(0)
        return excess * (-self.tightening * (depth - 1)).exp() if self.tightening else excess

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        """See `AcceptanceRule`; `relaxation` counts toward the budget.

        As in `recursive_rejection`, a later sibling is tested against the p that remains after the rejection of earlier
        siblings.
        """
        if not draft.tree.is_chain:
            rule = partial(self._decide_sibling, draft.tree)
            return verify_siblings(rule, probs, draft, noise, relaxation, self.budget)
        if fused.is_available(probs) and type(self).relaxation is RelaxedRule.relaxation and draft.tokens.shape[1]:
            unfiltered = None if draft.unfiltered_probs is None else draft.unfiltered_probs[:, :-1]
            accept_prob = self._accept_by_row(probs[:, :-1], draft.probs, draft.tokens, unfiltered, draft.is_greedy)
            return fused.verify_chain(probs, draft, noise, accept_prob, relaxation, self.budget, self.tightening)
        verdict, _, spent = self.verify_chain(probs, draft, noise, relaxation)
        return replace(verdict, relaxation=sum_relaxation(spent, verdict, draft))

    def verify_chain(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> tuple[Verdict, Siblings, Tensor]:
        """Return the verdict on a chain without its relaxation, the draft tokens, and the relaxation of each, `[B, T - 1]`."""
        slot = torch.arange(1, probs.shape[1], device=probs.device)[None]
        unfiltered = None if draft.unfiltered_probs is None else draft.unfiltered_probs[:, :-1]
        drafted = Siblings(probs[:, :-1], draft.probs, draft.tokens, slot, None, unfiltered, draft.is_greedy)
        spent = cap_to_budget(self.relaxation(drafted, draft.tree.depth[1:]), draft, relaxation, self.budget)
        accepted = noise.uniform(Purpose.ACCEPT)[:, :-1] < drafted.exact_accept_prob + spent
        return verify_chain(accepted, probs, draft, noise), drafted, spent  # as on a tree, but without its copies of p

    def _decide_sibling(self, tree: Tree, siblings: Siblings) -> SiblingDecision:
        depth = tree.depth.expand(len(siblings.token), -1).gather(1, siblings.slot.expand_as(siblings.token))
        relaxation = self.relaxation(siblings, depth)
        if siblings.max_relaxation is not None:
            relaxation = torch.minimum(relaxation, siblings.max_relaxation)
        return SiblingDecision(siblings.exact_accept_prob + relaxation, siblings.residual, relaxation)


def cap_to_budget(excess: Tensor, draft: Draft, relaxation: Tensor, budget: float | None) -> Tensor:
    """Limit the relaxation of each draft token of a chain, float `[B, T - 1]`.

    Invalid draft tokens get none, and the sum along the chain does not exceed the remaining budget.

    Args:
        excess: float `[B, T - 1]`, nonnegative, relaxation before the limit.
        relaxation: float32 `[B]`, spent in earlier passes.
        budget: maximum relaxation per image; None: no limit.
    """
    if draft.valid is not None:
        excess = torch.where(draft.valid, excess, 0.0)  # past the grid, logits may be NaN
    if budget is None:
        return excess
    total = torch.minimum(excess.cumsum(1), (budget - relaxation).clamp_min(0)[:, None])
    return total.diff(dim=1, prepend=torch.zeros_like(total[:, :1]))


def sum_relaxation(spent: Tensor, verdict: Verdict, draft: Draft) -> Tensor:
    """Relaxation of a pass, float `[B]`: the sum over the draft tokens that were tested, including the first rejected one."""
    tested = torch.arange(spent.shape[1], device=spent.device) < verdict.count[:, None]
    if draft.valid is not None:
        tested = tested & draft.valid
    return (spent * tested).sum(1)

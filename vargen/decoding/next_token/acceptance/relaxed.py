"""Relaxation: acceptance beyond the exact probability min(1, p / q), implemented once for all relaxed rules.

A relaxed rule specifies the probability f(x) with which it wants to accept draft token x. The base class spends the excess f(x)
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

from vargen.decoding.next_token.acceptance import fused
from vargen.decoding.next_token.acceptance.exact import judged, probability
from vargen.decoding.next_token.acceptance.siblings import SiblingDecision, Siblings, verify_siblings
from vargen.decoding.next_token.draft import Draft, Tree, Verdict
from vargen.decoding.next_token.protocols import AcceptanceRule
from vargen.decoding.noise import Noise, Purpose
from vargen.values import number_field, validate_fields


@dataclass(frozen=True, kw_only=True)
class RelaxedRule(AcceptanceRule):
    """Base class of relaxed rules. A subclass defines `wanted`, its acceptance probability for a draft token.

    Args:
        budget: maximum relaxation per image, at least 0; once it is spent, the rule is exact. None: no limit.
        tightening: nu, at least 0. Draft token i of a path, counted from 0, gets exp(-nu i) of the relaxation, so early tokens
            are verified loosely and late ones tightly (the schedule of Cool-SD, where nu is 0.7). Late tokens are reached less
            often, so relaxation gains less there. 0: no tapering.

    Raises:
        ValueError: if a value is out of range.
    """

    exact = False
    topologies = ("chain", "tree")

    budget: float | None = number_field(None, 0, optional=True, meaning="the maximum relaxation per image")
    tightening: float = number_field(0.0, 0)

    def __post_init__(self) -> None:
        validate_fields(self)

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        """Probability f of accepting each draft token of `tokens` `[B, S]`, clamped to between the exact probability and 1.

        Args:
            p, q: float32 `[B, S, V]`, target and draft distributions; q is None for a deterministic proposal.
        """
        raise NotImplementedError

    def wanted_greedily(self, p: Tensor, q: Tensor | None, tokens: Tensor, soft: Tensor) -> Tensor:
        """Like `wanted`, for greedy sampling: p is one-hot, and `soft` `[B, S, V]` is the target distribution at temperature 1.

        Rules without a greedy form use p.
        """
        return self.wanted(p, q, tokens)

    def granted(self, siblings: Siblings, depth: Tensor) -> Tensor:
        """Relaxation of each draft token, `[B, S]`, tapered with depth but not yet limited by the budget."""
        p, q, token, soft = siblings.p, siblings.q, siblings.token, siblings.soft
        wanted = self.wanted(p, q, token) if soft is None else self.wanted_greedily(p, q, token, soft)
        extra = (wanted.clamp(max=1.0) - siblings.exact_chance).clamp_min(0)
        return extra * (-self.tightening * (depth - 1)).exp() if self.tightening else extra

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        """See `AcceptanceRule`; `relaxation` counts toward the budget.

        As in `recursive_rejection`, a later sibling is tested against the p that remains after the rejection of earlier
        siblings.
        """
        if not draft.tree.is_chain:
            test = partial(self._test, draft.tree)
            return verify_siblings(test, probs, draft, noise, relaxation, self.budget)
        if fused.applies(probs) and type(self).granted is RelaxedRule.granted and draft.tokens.shape[1]:
            given = (probs[:, :-1], draft.probs, draft.tokens)
            wanted = (
                self.wanted(*given)
                if draft.unfiltered_probs is None
                else self.wanted_greedily(*given, draft.unfiltered_probs[:, :-1])
            )
            return fused.judged_chain(probs, draft, noise, wanted, relaxation, self.budget, self.tightening)
        verdict, _, granted = self.along_chain(probs, draft, noise, relaxation)
        return replace(verdict, relaxation=sum_relaxation(granted, verdict, draft))

    def along_chain(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> tuple[Verdict, Siblings, Tensor]:
        """Return the verdict on a chain without its relaxation, the draft tokens, and the relaxation of each, `[B, T - 1]`."""
        slot = torch.arange(1, probs.shape[1], device=probs.device)[None]
        soft = None if draft.unfiltered_probs is None else draft.unfiltered_probs[:, :-1]
        drafted = Siblings(probs[:, :-1], draft.probs, draft.tokens, slot, soft=soft, kept=draft.force_accept)
        granted = cap_to_budget(self.granted(drafted, draft.tree.depth[1:]), draft, relaxation, self.budget)
        accepted = noise.uniform(Purpose.ACCEPT)[:, :-1] < drafted.exact_chance + granted
        return judged(accepted, probs, draft, noise), drafted, granted  # as on a tree, but without its copies of p

    def _test(self, tree: Tree, siblings: Siblings) -> SiblingDecision:
        depth = tree.depth.expand(len(siblings.token), -1).gather(1, siblings.slot.expand_as(siblings.token))
        extra = self.granted(siblings, depth)
        if siblings.room is not None:
            extra = torch.minimum(extra, siblings.room)
        return SiblingDecision(siblings.exact_chance + extra, siblings.left, extra)


def cap_to_budget(granted: Tensor, draft: Draft, relaxation: Tensor, budget: float | None) -> Tensor:
    """Limit the relaxation of each draft token of a chain, float `[B, T - 1]`.

    Invalid draft tokens get none, and the sum along the chain does not exceed the remaining budget.

    Args:
        granted: float `[B, T - 1]`, nonnegative, relaxation before the limit.
        relaxation: float32 `[B]`, spent in earlier passes.
        budget: maximum relaxation per image; None: no limit.
    """
    if draft.valid is not None:
        granted = granted * draft.valid
    if budget is None:
        return granted
    total = torch.minimum(granted.cumsum(1), (budget - relaxation).clamp_min(0)[:, None])
    return total.diff(dim=1, prepend=torch.zeros_like(total[:, :1]))


def sum_relaxation(granted: Tensor, verdict: Verdict, draft: Draft) -> Tensor:
    """Relaxation of a pass, float `[B]`: the sum over the draft tokens that were tested, including the first rejected one."""
    examined = torch.arange(granted.shape[1], device=granted.device) < verdict.count[:, None]
    if draft.valid is not None:
        examined = examined & draft.valid
    return (granted * examined).sum(1)


@dataclass(frozen=True)
class RatioRule(RelaxedRule):
    """Relaxed rule: accept a draft token x if u < ratio p(x) / q(x); a rejection samples from norm((p - q)+).

    The simplest relaxed rule and the baseline at equal relaxation: it spends most on tokens that are likely under the target
    and uses no other information. With `tightening` it is the rule of Cool-SD, whose ratio decreases with depth. Here it
    decreases toward 1 and not below: a ratio below 1 rejects more than the exact rule, which adds bias for no gain.

    Args:
        ratio: at least 1; 1 is exact.
        budget, tightening: see `RelaxedRule`.

    Raises:
        ValueError: if a value is out of range.
    """

    ratio: float = number_field(2.0, 1)

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        return self.ratio * probability(p, tokens) / probability(q, tokens).clamp_min(1e-30)


@dataclass(frozen=True)
class TypicalRule(RelaxedRule):
    """Relaxed rule: always accept a draft token x with p(x) > min(epsilon, alpha exp(-H)), H being the entropy of p in nats.

    Typical acceptance (Cai et al. 2024, Medusa, section 2.3.1). Other draft tokens get the exact test, where Medusa rejects
    them: rejecting more than the exact rule adds bias for no gain. Image models have high entropy, so the second bound
    dominates: at 6 nats, tokens with p = 0.0007 are typical. Defaults are those of Medusa's helper function, with alpha about
    the square root of epsilon; its `generate` passes the two swapped.

    Args:
        epsilon: in (0, 1].
        alpha: above 0; the paper uses about the square root of epsilon.
        budget, tightening: see `RelaxedRule`.

    Raises:
        ValueError: if a value is out of range.
    """

    epsilon: float = number_field(0.09, 0, 1, open_below=True)
    alpha: float = number_field(0.3, 0, open_below=True)

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
        return (probability(p, tokens) > (self.alpha * (-entropy).exp()).clamp(max=self.epsilon)).to(p.dtype)

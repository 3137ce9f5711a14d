"""Relaxation: acceptance granted beyond the exact rule's min(1, p / q), in one place for every relaxed rule.

A relaxed rule says how likely it wants each draft x accepted, f(x); the frame here grants f(x) - min(1, p(x) / q(x)) where that
is above 0, tapers it with the depth of the draft, caps it by the budget, and sums what was granted. Wherever f is at least
the exact chance, (p - q f)+ is (p - q)+: the exact rule's residual is the optimal one of every relaxed rule, and the total
variation between what one step draws and p is then exactly the extra acceptance, the sum over x of q(x) (f(x) - min(1, p / q)),
whatever the rule. So what rules differ in is not how far the output is from p, but in which direction.

Shape suffixes: B images, T fed tokens of one pass, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from vargen.decoding.next_token.acceptance import fused
from vargen.decoding.next_token.acceptance.exact import judged, probability
from vargen.decoding.next_token.acceptance.siblings import SiblingDecision, Siblings, verify_siblings
from vargen.decoding.next_token.draft import Draft, Tree, Verdict
from vargen.decoding.next_token.protocols import TokenModel
from vargen.decoding.noise import Noise, Purpose
from vargen.values import parse_float, short_repr


@dataclass(frozen=True, kw_only=True)
class RelaxedRule:
    """What relaxed rules share; each of them says in `wanted` how likely it wants a draft accepted.

    Args:
        budget: most relaxation per image, 0 or more; past it the rule is exact. None: no limit.
        tightening: nu, 0 or more: draft i of a path, counted from 0, is granted exp(-nu i) of what the rule would grant, so
            early drafts are judged loosely and late ones tightly (the schedule of Cool-SD; its nu is 0.7). Late drafts are
            reached less often, so relaxation buys less there. 0: all alike.

    Raises:
        ValueError: for values outside these ranges.
    """

    exact: ClassVar[bool] = False
    topologies: ClassVar[tuple[str, ...]] = ("chain", "tree")

    budget: float | None = None
    tightening: float = 0.0

    def __post_init__(self) -> None:
        budget, tightening = parse_float(self.budget), parse_float(self.tightening)
        if self.budget is not None and (budget is None or budget < 0):
            raise ValueError(f"budget must be at least 0 (exact), or None for no limit, got {short_repr(self.budget)}")
        if tightening is None or tightening < 0:
            raise ValueError(f"tightening must be at least 0 (all drafts alike), got {short_repr(self.tightening)}")
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "tightening", tightening)

    def bind(self, model: TokenModel) -> Self:
        return self

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        """RandomShare f to accept each of the drafted `tokens` `[B, S]`; above 1 counts as 1, below the exact chance as that.

        Args:
            p, q: float32 `[B, S, V]`, probabilities of target and draft at each; q None for a deterministic proposal.
        """
        raise NotImplementedError

    def wanted_greedily(self, p: Tensor, q: Tensor | None, tokens: Tensor, soft: Tensor) -> Tensor:
        """As `wanted`, where the likeliest token is drawn: p is one on it, `soft` `[B, S, V]` is the target's at temperature 1.

        Rules that have no such form judge by p.
        """
        return self.wanted(p, q, tokens)

    def granted(self, siblings: Siblings, depth: Tensor) -> Tensor:
        """Acceptance beyond the exact rule's for each draft, tapered with its depth, `[B, S]`; the budget comes later."""
        p, q, token, soft = siblings.p, siblings.q, siblings.token, siblings.soft
        wanted = self.wanted(p, q, token) if soft is None else self.wanted_greedily(p, q, token, soft)
        extra = (wanted.clamp(max=1.0) - siblings.exact_chance).clamp_min(0)
        return extra * (-self.tightening * (depth - 1)).exp() if self.tightening else extra

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        """See `AcceptanceRule`; `relaxation` counts against the budget.

        Of siblings, a later one is judged by what the refusal of the elder ones leaves of p, as by `recursive_rejection`.
        """
        if not draft.tree.chain:
            test = partial(self._test, draft.tree)
            return verify_siblings(test, probs, draft, noise, relaxation, self.budget)
        if fused.applies(probs) and type(self).granted is RelaxedRule.granted and draft.tokens.shape[1]:
            given = (probs[:, :-1], draft.probs, draft.tokens)
            wanted = self.wanted(*given) if draft.soft is None else self.wanted_greedily(*given, draft.soft[:, :-1])
            return fused.judged_chain(probs, draft, noise, wanted, relaxation, self.budget, self.tightening)
        verdict, _, granted = self.along_chain(probs, draft, noise, relaxation)
        return replace(verdict, relaxation=sum_relaxation(granted, verdict, draft))

    def along_chain(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> tuple[Verdict, Siblings, Tensor]:
        """The verdict on a chain, without its relaxation; the drafts, and what each is granted, `[B, T - 1]`."""
        slot = torch.arange(1, probs.shape[1], device=probs.device)[None]
        soft = None if draft.soft is None else draft.soft[:, :-1]
        drafted = Siblings(probs[:, :-1], draft.probs, draft.tokens, slot, soft=soft, kept=draft.kept)
        granted = cap_to_budget(self.granted(drafted, draft.tree.depth[1:]), draft, relaxation, self.budget)
        accepted = noise.uniform(Purpose.ACCEPT)[:, :-1] < drafted.exact_chance + granted
        return judged(accepted, probs, draft, noise), drafted, granted  # as the walk over a tree, without its copies of p

    def _test(self, tree: Tree, siblings: Siblings) -> SiblingDecision:
        depth = tree.depth.expand(len(siblings.token), -1).gather(1, siblings.slot.expand_as(siblings.token))
        extra = self.granted(siblings, depth)
        if siblings.room is not None:
            extra = torch.minimum(extra, siblings.room)
        return SiblingDecision(siblings.exact_chance + extra, siblings.left, extra)


def cap_to_budget(granted: Tensor, draft: Draft, relaxation: Tensor, budget: float | None) -> Tensor:
    """What may be granted to each draft of a chain, float `[B, T - 1]`: nothing to invalid ones, and in sum along the chain no
    more than the budget leaves.

    Args:
        granted: float `[B, T - 1]`, at least 0, what the rule would grant.
        relaxation: float32 `[B]`, granted by earlier passes.
        budget: most relaxation of an image; None: no limit.
    """
    if draft.valid is not None:
        granted = granted * draft.valid
    if budget is None:
        return granted
    total = torch.minimum(granted.cumsum(1), (budget - relaxation).clamp_min(0)[:, None])
    return total.diff(dim=1, prepend=torch.zeros_like(total[:, :1]))


def sum_relaxation(granted: Tensor, verdict: Verdict, draft: Draft) -> Tensor:
    """Relaxation of a pass, float `[B]`: what was granted to the drafts that were examined, the first refused one included."""
    examined = torch.arange(granted.shape[1], device=granted.device) < verdict.count[:, None]
    if draft.valid is not None:
        examined = examined & draft.valid
    return (granted * examined).sum(1)


@dataclass(frozen=True)
class RatioRule(RelaxedRule):
    """RelaxedRule: accept a draft x while u < ratio p(x) / q(x), draw norm((p - q)+) at a refusal.

    The plainest relaxed rule, which every other one has to beat at equal relaxation: it grants most to drafts that the target
    finds likely, and asks nothing else. With `tightening` it is the rule of Cool-SD, whose ratio falls with the depth, here
    towards 1 and not below: a ratio below 1 would refuse more than the exact rule, which biases the output for nothing.

    Args:
        ratio: 1 (exact) or more.
        budget, tightening: see `RelaxedRule`.

    Raises:
        ValueError: for values outside these ranges.
    """

    ratio: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio = parse_float(self.ratio)
        if ratio is None or ratio < 1:
            raise ValueError(f"ratio must be at least 1, which is exact, got {short_repr(self.ratio)}")
        object.__setattr__(self, "ratio", ratio)

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        return self.ratio * probability(p, tokens) / probability(q, tokens).clamp_min(1e-30)


@dataclass(frozen=True)
class TypicalRule(RelaxedRule):
    """RelaxedRule: accept a draft x surely where p(x) > min(epsilon, alpha exp(-H)), H the entropy of p in nats.

    TypicalRule acceptance (Cai et al. 2024, Medusa, section 2.3.1). Other drafts are judged exactly, where Medusa refuses them:
    refusing more than p / q asks biases the output for nothing. Image models are uncertain, so the second bound rules: at an
    entropy of 6 nats, tokens of 0.0007 are typical. The defaults are those of Medusa's helper, alpha about the square root of
    epsilon; its `generate` passes the two exchanged.

    Args:
        epsilon: in (0, 1].
        alpha: above 0; the paper takes about the square root of epsilon.
        budget, tightening: see `RelaxedRule`.

    Raises:
        ValueError: for values outside these ranges.
    """

    epsilon: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        epsilon, alpha = parse_float(self.epsilon), parse_float(self.alpha)
        if epsilon is None or not 0 < epsilon <= 1:
            raise ValueError(f"epsilon must be in (0, 1], got {short_repr(self.epsilon)}")
        if alpha is None or alpha <= 0:
            raise ValueError(f"alpha must be above 0, got {short_repr(self.alpha)}")
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "alpha", alpha)

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
        return (probability(p, tokens) > (self.alpha * (-entropy).exp()).clamp(max=self.epsilon)).to(p.dtype)

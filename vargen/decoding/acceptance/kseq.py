"""K-SEQ: siblings that were drawn with replacement are accepted alike, whatever their rank.

Shape suffixes: B images, T fed tokens of one pass, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vargen.decoding.acceptance.rule import acceptance_rule
from vargen.decoding.acceptance.siblings import verdict_of
from vargen.decoding.draft import Draft, Verdict
from vargen.decoding.noise import Noise, Purpose

_HALVINGS = 30  # of [1, K]: finer than float32 tells factors apart


@acceptance_rule(exact=True, topologies=("chain", "tree"), needs=("replacement",))
def k_seq(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Of K siblings from one q, accept the first with u < p(x) / (rho q(x)) (Sun et al. 2023, SpecTr, algorithm 2).

    With beta(rho) = sum min(q, p / rho), a sibling is accepted with probability beta, one of K with a = 1 - (1 - beta)^K. The
    token that is left to draw follows p - min(q, p / rho) a / beta, which is at least 0 where a <= rho beta; the smallest such
    rho in [1, K] is found by bisection, for all slots at once. With one child it is `exact`. Siblings have to be as many at a
    slot whatever is drawn. Arguments: see `AcceptanceRule`.
    """
    B, T, _ = probs.shape
    tree = draft.tree
    if draft.probs is None:
        raise ValueError("k_seq judges siblings that were drawn, and this draft has no probabilities; use recursive_rejection")
    children = tree.children.expand(B, T, tree.widest)
    at = (children - 1).clamp(min=0)
    there = children > 0
    if draft.valid is not None:
        there &= draft.valid.gather(1, at.flatten(1)).view_as(at)
    if not tree.widest:
        return verdict_of(torch.zeros(B, T, dtype=torch.bool, device=probs.device), probs, draft, noise)[0]
    q = draft.probs[torch.arange(B, device=at.device)[:, None], at[..., 0]]  # of all siblings of a slot
    number = there.sum(-1).to(probs.dtype)
    rho, beta = _factor(probs, q, number)
    tokens = draft.tokens.gather(1, at.flatten(1)).view_as(at)  # [B, T, K]
    chance = probs.gather(2, tokens) / (rho[..., None] * q.gather(2, tokens))
    coins = torch.stack([noise.branch(rank).uniform(Purpose.ACCEPT) for rank in range(tree.widest)], -1)
    hit = there & (coins < chance)
    hit &= hit.cumsum(-1) == 1  # the first of them
    stands = torch.zeros(B, T, dtype=torch.bool, device=probs.device).scatter(1, children.flatten(1), hit.flatten(1))
    accepts = 1 - (1 - beta) ** number
    share = torch.where(beta > 0, accepts / beta, 0.0)[..., None]
    left = (probs - torch.minimum(q, probs / rho[..., None]) * share).clamp_min_(0)
    left = torch.where(there[..., :1] & (left.sum(-1, keepdim=True) > 0), left, probs)
    return verdict_of(stands, left, draft, noise)[0]


def _factor(p: Tensor, q: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """rho and beta(rho), `[B, T]` each, for `number` siblings `[B, T]`; always a <= rho beta, up to rounding."""
    low, high = torch.ones_like(number), number.clamp(min=1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beta = torch.minimum(q, p / middle[..., None]).sum(-1)
        fits = 1 - (1 - beta) ** number <= middle * beta
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high, torch.minimum(q, p / high[..., None]).sum(-1)

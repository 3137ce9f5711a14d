"""Recursive rejection sampling: the exact p/q rule for siblings."""

from __future__ import annotations

import torch
from torch import Tensor

from vargen.decoding.next_token.acceptance import fused
from vargen.decoding.next_token.acceptance.base import acceptance_rule
from vargen.decoding.next_token.acceptance.siblings import SiblingDecision, Siblings, followed, verify_siblings
from vargen.decoding.next_token.draft import Draft, Verdict
from vargen.decoding.noise import Noise, Purpose


@acceptance_rule(exact=True, topologies=("chain", "tree"))
def recursive_rejection(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Siblings one after the other: accept x while u < p(x) / q(x); at a refusal p becomes norm((p - q)+) for the next.

    One rule for three kinds of drafts, told apart by the q that is recorded of each sibling: drawn with replacement, all from
    one q (Miao et al. 2024, SpecInfer); without, q less the elder siblings (Jeon et al. 2024, RSD; Chen et al. 2024, Sequoia);
    not drawn at all, q one on the token itself, so that x is accepted with p(x) and then left out of p (Li et al. 2024,
    EAGLE-2). On a chain it is `exact`. The output follows the target if each q is what the sibling was really drawn with.
    Arguments: see `AcceptanceRule`.
    """
    if fused.applies(probs):
        return fused.walked(probs, draft, noise)
    return verify_siblings(_test, probs, draft, noise)


def _test(siblings: Siblings) -> SiblingDecision:
    p, q = siblings.own
    return SiblingDecision(p / q)


_HALVINGS = 30  # of [1, K]: finer than float32 tells factors apart


@acceptance_rule(exact=True, topologies=("chain", "tree"), needs=("replacement",))
def k_seq(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Of K siblings from one q, accept the first with u < p(x) / (rho q(x)) (Sun et al. 2023, SpecTr, algorithm 2).

    With beta(rho) = sum min(q, p / rho), a sibling is accepted with probability beta, one of K with a = 1 - (1 - beta)^K. The
    token that is left to draw follows p - min(q, p / rho) a / beta, which is at least 0 where a <= rho beta; the smallest such
    rho in [1, K] is found by bisection, for all slots at once. With one child it is `exact`. Siblings have to be as many at a
    slot whatever is drawn. Arguments: see `AcceptanceRule`.
    """
    if draft.probs is None:
        raise ValueError("k_seq judges siblings that were drawn, and this draft has no probabilities; use recursive_rejection")
    B, T, _ = probs.shape
    image, tree = torch.arange(B, device=probs.device)[:, None], draft.tree
    parents = tree.parents_of_rank[0] if tree.widest else torch.zeros(1, dtype=torch.int64, device=probs.device)
    children = tree.children.expand(B, T, -1)[:, parents]  # [B, R, K] of the slots that have any
    at = (children - 1).clamp(min=0)
    there = children > 0 if draft.valid is None else (children > 0) & draft.valid[image[..., None], at]
    p = probs[:, parents]
    q = draft.probs[image, at[..., 0]] if tree.widest else p  # of all siblings of a slot
    number = there.sum(-1).to(probs.dtype)
    rho, beta = _factor(p, q, number)
    tokens = draft.tokens[image[..., None], at]
    chance = p.gather(2, tokens) / (rho[..., None] * q.gather(2, tokens))
    coins = [noise.branch(rank).uniform(Purpose.ACCEPT)[:, parents] for rank in range(tree.widest)]
    hit = there & (torch.stack(coins, -1) < chance) if coins else there
    hit = hit & (hit.cumsum(-1) == 1)  # the first of them
    stands = torch.zeros(B, T, dtype=torch.bool, device=probs.device).scatter(1, children.flatten(1), hit.flatten(1))
    path, count, _ = followed(stands, tree)
    last = path.gather(1, count[:, None] - 1)
    row = torch.searchsorted(parents, last).clamp(max=len(parents) - 1)  # of the slot among those that have children
    has = there[image, row].any(-1) & (parents[row] == last)
    accepts = 1 - (1 - beta) ** number
    share = torch.where(beta > 0, accepts / beta, 0.0)[image, row]
    behind = probs[image, last]
    left = (behind - torch.minimum(q[image, row], behind / rho[image, row][..., None]) * share[..., None]).clamp_min_(0)
    left = torch.where(has[..., None] & (left.sum(-1, keepdim=True) > 0), left, behind)
    return Verdict(path, count, noise.at(last[:, 0]).draw(left, Purpose.RESIDUAL)[:, 0])


def _factor(p: Tensor, q: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """rho and beta(rho), `[B, T]` each, for `number` siblings `[B, T]`; always a <= rho beta, up to rounding."""
    low, high = torch.ones_like(number), number.clamp(min=1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beta = torch.minimum(q, p / middle[..., None]).sum(-1)
        fits = 1 - (1 - beta) ** number <= middle * beta
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high, torch.minimum(q, p / high[..., None]).sum(-1)

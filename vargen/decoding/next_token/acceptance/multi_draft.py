"""Exact acceptance rules for several draft tokens per slot: recursive rejection sampling and k-SEQ."""

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
    """Verify siblings in order: accept x if u < p(x) / q(x); after a rejection, p becomes norm((p - q)+) for the next sibling.

    The recorded q of each sibling selects one of three published variants. Sampled with replacement, all siblings from one q:
    Miao et al. 2024, SpecInfer. Sampled without replacement, q excluding the earlier siblings: Jeon et al. 2024, RSD; Chen et
    al. 2024, Sequoia. Not sampled, q being one on the token itself, so that x is accepted with probability p(x) and then
    removed from p: Li et al. 2024, EAGLE-2.

    On a chain it equals `speculative_sampling`. The output is distributed as the target provided that each q is the
    distribution its sibling was actually sampled from. Arguments: see `AcceptanceRule`.
    """
    if fused.applies(probs):
        return fused.walked(probs, draft, noise)
    return verify_siblings(_test, probs, draft, noise)


def _test(siblings: Siblings) -> SiblingDecision:
    p, q = siblings.own
    return SiblingDecision(p / q)


_HALVINGS = 30  # bisection steps on [1, K]: beyond the resolution of float32


@acceptance_rule(exact=True, topologies=("chain", "tree"), requires=("with-replacement",))
def k_seq(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Accept the first of K siblings, all sampled from one q, with u < p(x) / (rho q(x)).

    k-SEQ of SpecTr (Sun et al. 2023, algorithm 2). With beta(rho) = sum min(q, p / rho), one sibling is accepted with
    probability beta, and some sibling of K with probability a = 1 - (1 - beta)^K. If all are rejected, the next token is
    sampled from p - min(q, p / rho) a / beta, which is nonnegative where a <= rho beta. The smallest such rho in [1, K] is
    found by bisection, for all slots at once.

    With one child per slot it equals `speculative_sampling`. The number of siblings of a slot must not depend on the samples.
    Arguments: see `AcceptanceRule`.
    """
    if draft.probs is None:
        raise ValueError("k_seq judges siblings that were drawn, and this draft has no probabilities; use recursive_rejection")
    B, T, _ = probs.shape
    image, tree = torch.arange(B, device=probs.device)[:, None], draft.tree
    parents = tree.slots_with_rank[0] if tree.max_children else torch.zeros(1, dtype=torch.int64, device=probs.device)
    children = tree.children.expand(B, T, -1)[:, parents]  # [B, R, K], for the slots that have children
    at = (children - 1).clamp(min=0)
    there = children > 0 if draft.valid is None else (children > 0) & draft.valid[image[..., None], at]
    p = probs[:, parents]
    q = draft.probs[image, at[..., 0]] if tree.max_children else p  # shared by all siblings of a slot
    number = there.sum(-1).to(probs.dtype)
    rho, beta = _factor(p, q, number)
    tokens = draft.tokens[image[..., None], at]
    chance = p.gather(2, tokens) / (rho[..., None] * q.gather(2, tokens))
    coins = [noise.branch(rank).uniform(Purpose.ACCEPT)[:, parents] for rank in range(tree.max_children)]
    hit = there & (torch.stack(coins, -1) < chance) if coins else there
    hit = hit & (hit.cumsum(-1) == 1)  # only the first
    stands = torch.zeros(B, T, dtype=torch.bool, device=probs.device).scatter(1, children.flatten(1), hit.flatten(1))
    path, count, _ = followed(stands, tree)
    last = path.gather(1, count[:, None] - 1)
    row = torch.searchsorted(parents, last).clamp(max=len(parents) - 1)  # index of the slot among those that have children
    has = there[image, row].any(-1) & (parents[row] == last)
    accepts = 1 - (1 - beta) ** number
    share = torch.where(beta > 0, accepts / beta, 0.0)[image, row]
    behind = probs[image, last]
    left = (behind - torch.minimum(q[image, row], behind / rho[image, row][..., None]) * share[..., None]).clamp_min_(0)
    left = torch.where(has[..., None] & (left.sum(-1, keepdim=True) > 0), left, behind)
    return Verdict(path, count, noise.at(last[:, 0]).draw(left, Purpose.RESIDUAL)[:, 0])


def _factor(p: Tensor, q: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return rho and beta(rho), `[B, T]` each, for `number` siblings `[B, T]`; a <= rho beta holds up to rounding."""
    low, high = torch.ones_like(number), number.clamp(min=1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beta = torch.minimum(q, p / middle[..., None]).sum(-1)
        fits = 1 - (1 - beta) ** number <= middle * beta
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high, torch.minimum(q, p / high[..., None]).sum(-1)

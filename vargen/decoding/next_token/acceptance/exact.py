"""Speculative sampling with p/q acceptance and residual resampling, shared noise, and the building blocks of chain rules.

Shape suffixes: B images, T tokens fed in one pass, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vargen.decoding.next_token.acceptance import fused
from vargen.decoding.next_token.acceptance.base import acceptance_rule
from vargen.decoding.next_token.acceptance.siblings import followed
from vargen.decoding.next_token.draft import Draft, Verdict
from vargen.decoding.noise import Noise, Purpose


@acceptance_rule(exact=True)
def speculative_sampling(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Speculative sampling: accept draft token d if u < p(d) / q(d); at the first rejection, sample from norm((p - q)+).

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1. If the whole draft is accepted, the next token is sampled
    from p. The output is distributed as the target provided that q is the distribution the draft was actually sampled from.
    Arguments: see `AcceptanceRule`.
    """
    if fused.applies(probs):
        return fused.judged_chain(probs, draft, noise)
    p, q = chances(probs, draft)
    coins = noise.uniform(Purpose.ACCEPT)[:, :-1]
    return judged(coins * q < p, probs, draft, noise)


def chances(probs: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Return the probabilities of each draft token under p and q, `[B, T - 1]` each. q of a deterministic draft is 1."""
    return probability(probs[:, :-1], draft.tokens), probability(draft.probs, draft.tokens)


def probability(probs: Tensor | None, tokens: Tensor) -> Tensor:
    """Look up the probabilities of tokens `[B, S]` in `probs` `[B, S, V]`; ones for a deterministic proposal (None)."""
    return torch.ones(tokens.shape, device=tokens.device) if probs is None else probs.gather(2, tokens[..., None])[..., 0]


def dense_draft_probs(probs: Tensor, draft: Draft) -> Tensor:
    """q as `[B, T - 1, V]`; one-hot for a deterministic draft."""
    return draft.probs if draft.probs is not None else torch.zeros_like(probs[:, 1:]).scatter_(2, draft.tokens[..., None], 1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Unnormalized residual (p - q)+, `[..., V]`; p itself where the residual is zero (p equals q up to rounding)."""
    left = (p - q).clamp_min_(0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def resample_rejected(probs: Tensor, draft: Draft, noise: Noise, kept: Tensor, anew: Tensor | None = None) -> Tensor:
    """Replace rejected draft tokens, at all slots at once.

    Returns one token per slot, int64 `[B, T]`. A kept draft token is returned unchanged; a rejected one is replaced by a sample
    from the residual distribution norm((p - q)+). The token is sampled from p itself in three cases: the slot has no valid
    draft token, `anew` is set, or the slot is the last.

    If draft tokens are kept with probability min(1, p / q), the old and new tokens form a maximal coupling, and every returned
    token is distributed as p.

    Args:
        kept: bool `[B, T - 1]`, which draft tokens are accepted.
        anew: bool `[B, T - 1]`, which are resampled from p in any case; None: none.
    """
    coupled = torch.ones_like(kept) if draft.valid is None else draft.valid
    if anew is not None:
        coupled = coupled & ~anew
    left = probs.clone()  # updated in place to save memory: V is large
    left[:, :-1].addcmul_(dense_draft_probs(probs, draft), coupled[..., None].to(probs.dtype), value=-1).clamp_(min=0)
    empty = left[:, :-1].sum(-1) <= 0  # p equals q up to rounding: keep the draft token
    drawn = noise.draw(left, Purpose.REDRAW)
    drawn[:, :-1] = torch.where(kept & coupled | empty, draft.tokens, drawn[:, :-1])
    return drawn


def judged(accepted: Tensor, probs: Tensor, draft: Draft, noise: Noise) -> Verdict:
    """Return the verdict on a chain, given which draft tokens passed their own test, `accepted` bool `[B, T - 1]`.

    Tokens up to the first rejection are committed, and the next token is sampled from the residual there. After a fully
    accepted draft, and where an image has no draft token, it is sampled from the target distribution.
    """
    B, T, _ = probs.shape
    if draft.valid is not None:
        accepted = accepted & draft.valid
    count = 1 + accepted.cumprod(1).sum(1)
    row, at = count - 1, torch.arange(B, device=probs.device)
    target = probs[at, row]
    if T > 1:
        slot = row.clamp(max=T - 2)
        refused = row < T - 1
        if draft.valid is not None:
            refused = refused & draft.valid[at, slot]
        target = torch.where(refused[:, None], residual(target, dense_draft_probs(probs, draft)[at, slot]), target)
    next_token = noise.at(row).draw(target[:, None], Purpose.RESIDUAL)[:, 0]
    path = torch.arange(T, device=probs.device).expand(B, T)
    return Verdict(path=path, count=count, next_token=next_token)


@acceptance_rule(exact=True, topologies=("chain", "tree"))
def shared_noise(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Exact, and identical to sequential decoding: accept a draft token if it equals the token that the shared noise selects.

    With the Gumbel noise G fixed per image and position, the token at a position *is* argmax(log p + G) (Maddison et al. 2014);
    a draft token is accepted exactly when it equals that token. With an empty draft this is sequential sampling. The draft
    probabilities q are not used. Arguments: see `AcceptanceRule`.
    """
    drawn = noise.draw(probs, Purpose.TOKEN)  # [B, T]: the token after each slot
    if fused.applies(probs):
        return fused.matched(drawn, draft)
    tree = draft.tree
    agrees = drawn.new_ones(drawn.shape).bool()
    agrees[:, 1:] = draft.tokens == drawn.gather(1, tree.parents[..., 1:].expand(len(drawn), -1))
    if tree.max_children > 1:  # siblings may hold the same token: accept only the first
        agrees = agrees & ~(agrees[:, None, :] & tree.earlier_siblings).any(-1)
    path, count, _ = followed(agrees, tree)
    last = path.gather(1, count[:, None] - 1)
    return Verdict(path=path, count=count, next_token=drawn.gather(1, last)[:, 0], sampled=drawn)

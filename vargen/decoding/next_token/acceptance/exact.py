"""Speculative sampling: p/q acceptance and the residual, and the pieces that other rules of chains are made of.

Shape suffixes: B images, T fed tokens of one pass, V vocabulary.
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
def exact(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Speculative sampling: accept a draft d while u < p(d) / q(d), draw norm((p - q)+) at the first refusal.

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1. What follows a fully accepted draft is drawn from p. The
    output follows the target if q is what the draft was really drawn with. Arguments: see `AcceptanceRule`.
    """
    if fused.applies(probs):
        return fused.judged_chain(probs, draft, noise)
    p, q = chances(probs, draft)
    coins = noise.uniform(Purpose.ACCEPT)[:, :-1]
    return judged(coins * q < p, probs, draft, noise)


def chances(probs: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """What p and q gave each drafted token, `[B, T - 1]` each; q of a deterministic draft is 1."""
    return probability(probs[:, :-1], draft.tokens), probability(draft.probs, draft.tokens)


def probability(probs: Tensor | None, tokens: Tensor) -> Tensor:
    """What probabilities `[B, S, V]` give tokens `[B, S]`; one for those of a deterministic proposal, None."""
    return torch.ones(tokens.shape, device=tokens.device) if probs is None else probs.gather(2, tokens[..., None])[..., 0]


def dense_draft_probs(probs: Tensor, draft: Draft) -> Tensor:
    """q as `[B, T - 1, V]`, one-hot for a deterministic draft."""
    return draft.probs if draft.probs is not None else torch.zeros_like(probs[:, 1:]).scatter_(2, draft.tokens[..., None], 1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+, not normalised, `[..., V]`; p itself where nothing is left, that is where p equals q up to rounding."""
    left = (p - q).clamp_min_(0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def resample_rejected(probs: Tensor, draft: Draft, noise: Noise, kept: Tensor, anew: Tensor | None = None) -> Tensor:
    """int64 `[B, T]`: behind every fed slot the draft, where it is kept, and a draw from norm((p - q)+) where it is not; from p
    where there is no valid draft, where it is to be drawn `anew`, and behind the last slot. Masks are bool `[B, T - 1]`.

    If drafts are kept with chance min(1, p / q) it is a maximal coupling, whose tokens have the probabilities p.
    """
    coupled = torch.ones_like(kept) if draft.valid is None else draft.valid
    if anew is not None:
        coupled = coupled & ~anew
    left = probs.clone()  # in place, because these are wide
    left[:, :-1].addcmul_(dense_draft_probs(probs, draft), coupled[..., None].to(probs.dtype), value=-1).clamp_(min=0)
    empty = left[:, :-1].sum(-1) <= 0  # p equals q up to rounding: the draft stands
    drawn = noise.draw(left, Purpose.REDRAW)
    drawn[:, :-1] = torch.where(kept & coupled | empty, draft.tokens, drawn[:, :-1])
    return drawn


def judged(accepted: Tensor, probs: Tensor, draft: Draft, noise: Noise) -> Verdict:
    """The verdict of a chain whose drafts passed or failed their own tests, `accepted` bool `[B, T - 1]`.

    Commits up to the first failure, where the residual is drawn; behind the last draft, and where an image has none, the
    target's probabilities are.
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
    """Exact, and the sequential picture itself: a draft stands where it equals what its position's noise draws.

    With the Gumbel noise G fixed per image and position, the token at a position *is* argmax(log p + G) (Maddison et al. 2014);
    a draft is accepted exactly when it is that token. With an empty draft this is sequential sampling. The draft's own
    probabilities do not matter. Arguments: see `AcceptanceRule`.
    """
    drawn = noise.draw(probs, Purpose.TOKEN)  # [B, T]: what follows each slot
    if fused.applies(probs):
        return fused.matched(drawn, draft)
    tree = draft.tree
    agrees = drawn.new_ones(drawn.shape).bool()
    agrees[:, 1:] = draft.tokens == drawn.gather(1, tree.parents[..., 1:].expand(len(drawn), -1))
    if tree.widest > 1:  # siblings may be alike
        agrees = agrees & ~(agrees[:, None, :] & tree.elders).any(-1)
    path, count, _ = followed(agrees, tree)
    last = path.gather(1, count[:, None] - 1)
    return Verdict(path=path, count=count, next_token=drawn.gather(1, last)[:, 0], drawn=drawn)

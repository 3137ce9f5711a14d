"""Exact acceptance rules, and the parts that chain rules are made of.

A rule is a pure, batched function of the target distribution and a draft that returns a `Verdict`. Where Triton kernels run,
they return the same verdicts in one launch.

Shape suffixes: B images, T tokens fed in one pass, S draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.interfaces import AcceptanceRule, VerifyTokens
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.tree import Draft, Verdict
from vargen.kernels import ops

VerifyFunction = Callable[[Tensor, Draft, Noise, Tensor], Verdict]


class FunctionRule(AcceptanceRule):
    """An `AcceptanceRule` given by a function, with its name and further attributes. It needs nothing from the model."""

    __qualname__: str

    def __init__(self, function: VerifyFunction, attributes: Mapping[str, Any]):
        update_wrapper(self, function)
        self.function = function
        vars(self).update(attributes)

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        return self.function(probs, draft, noise, relaxation)

    def __repr__(self) -> str:
        return self.__qualname__

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled, like a function, by its name in its module


def acceptance_rule(
    *,
    exact: bool,
    topologies: tuple[str, ...] = ("chain",),
    requires: tuple[str, ...] = (),
    sequential_tokens: bool = False,
    leaves_first: bool = False,
    verify_tokens: VerifyTokens | None = None,
) -> Callable[[VerifyFunction], FunctionRule]:
    """Decorate a function as an `AcceptanceRule`; see there for the arguments."""
    return partial(FunctionRule, attributes=dict(locals()))


# -- speculative sampling -----------------------------------------------------------------------------------------------


@acceptance_rule(exact=True)
def speculative_sampling(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Speculative sampling: accept draft token d if u < p(d) / q(d); at the first rejection, sample from norm((p - q)+).

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1. If the whole draft is accepted, the next token is sampled
    from p. The output is distributed as the target provided that q is the distribution the draft was actually sampled from.
    Arguments: see `AcceptanceRule`.
    """
    if (found := ops.verify_chain(probs, draft, noise)) is not None:
        return Verdict(*found)
    p, q = gather_p_and_q(probs, draft)
    uniforms = noise.uniform(Purpose.ACCEPT)[:, :-1]
    return verify_chain(uniforms * q < p, probs, draft, noise)


def gather_p_and_q(probs: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Return the probabilities of each draft token under p and q, `[B, T - 1]` each. q of a deterministic draft is 1."""
    return gather_prob(probs[:, :-1], draft.tokens), gather_prob(draft.probs, draft.tokens)


def gather_prob(probs: Tensor | None, tokens: Tensor) -> Tensor:
    """Look up the probabilities of tokens `[B, S]` in `probs` `[B, S, V]`; ones for a deterministic proposal (None)."""
    if probs is None:
        return torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
    return probs.gather(2, tokens[..., None])[..., 0]


def dense_draft_probs(probs: Tensor, draft: Draft) -> Tensor:
    """q as `[B, T - 1, V]`; one-hot for a deterministic draft."""
    if draft.probs is not None:
        return draft.probs
    return torch.zeros_like(probs[:, 1:]).scatter_(2, draft.tokens[..., None], 1.0)


def verify_chain(accepted: Tensor, probs: Tensor, draft: Draft, noise: Noise) -> Verdict:
    """Return the verdict on a chain, given which draft tokens passed their own test, `accepted` bool `[B, T - 1]`.

    Tokens up to the first rejection are committed, and the next token is sampled from the residual there. After a fully
    accepted draft, and where an image has no draft token, it is sampled from the target distribution.
    """
    B, T, _ = probs.shape
    image = torch.arange(B, device=probs.device)
    count = 1 + draft.only_valid(accepted).cumprod(1).sum(1)
    last = count - 1  # the last accepted node, and the index of the rejected draft token
    target = probs[image, last]
    if T > 1:
        rejected, index = draft.only_valid(torch.ones_like(accepted)), last.clamp(max=T - 2)
        residual = residual_weights(target, dense_draft_probs(probs, draft)[image, index])
        target = torch.where((rejected[image, index] & (last < T - 1))[:, None], residual, target)
    next_token = noise.select_slot(last).sample(target[:, None], Purpose.RESIDUAL)[:, 0]
    return Verdict(torch.arange(T, device=probs.device).expand(B, T), count, next_token)


def residual_weights(p: Tensor, q: Tensor) -> Tensor:
    """Unnormalized residual (p - q)+, `[..., V]`; p itself where the residual is zero (p equals q up to rounding)."""
    difference = (p - q).clamp_min_(0)
    return torch.where(difference.sum(-1, keepdim=True) > 0, difference, p)


# -- a coupling of old and new tokens -------------------------------------------------------------------------------------


def resample_rejected(
    probs: Tensor, draft: Draft, noise: Noise, accepted: Tensor, force_resample: Tensor | None = None
) -> Tensor:
    """Replace rejected draft tokens, all at once.

    Returns the token after each node, int64 `[B, T]`. An accepted draft token is returned unchanged; a rejected one is replaced
    by a sample from the residual distribution norm((p - q)+). The token is sampled from p itself in three cases: there is no
    valid draft token, `force_resample` is set, or the node is the last.

    If draft tokens are accepted with probability min(1, p / q), the old and new tokens form a maximal coupling, and every
    returned token is distributed as p.

    Args:
        accepted: bool `[B, T - 1]`, which draft tokens are accepted.
        force_resample: bool `[B, T - 1]`, which are resampled from p in any case; None: none.
    """
    coupled = draft.only_valid(torch.ones_like(accepted) if force_resample is None else ~force_resample)
    weights = probs.clone()  # updated in place to save memory: V is large
    weights[:, :-1].addcmul_(dense_draft_probs(probs, draft), coupled[..., None].to(probs.dtype), value=-1).clamp_(min=0)
    empty = weights[:, :-1].sum(-1) <= 0  # p equals q up to rounding: keep the draft token
    kept = accepted & coupled | empty
    sampled = noise.where(torch.nn.functional.pad(~kept, (0, 1), value=True)).sample(weights, Purpose.RESAMPLE)
    sampled[:, :-1] = torch.where(kept, draft.tokens, sampled[:, :-1])
    return sampled


# -- shared noise ---------------------------------------------------------------------------------------------------------


def verify_shared_tokens(sampled: Tensor, draft: Draft) -> Verdict:
    """Verdict of `shared_noise`, given the tokens int64 `[B, T]` that the noise selects after each node."""
    tree = draft.tree
    if (found := ops.verify_shared_noise(sampled, draft)) is not None:
        return Verdict(*found, sampled=sampled)
    if tree.is_chain:
        count = 1 + (draft.tokens == sampled[:, :-1]).cumprod(1).sum(1)
        path = torch.arange(tree.max_path, device=sampled.device).expand_as(sampled)
        return Verdict(path, count, sampled.gather(1, count[:, None] - 1)[:, 0], sampled=sampled)
    agrees = draft.only_valid(draft.tokens == sampled.gather(1, tree.parents[..., 1:].expand(len(sampled), -1)))
    agrees = torch.nn.functional.pad(agrees, (1, 0), value=True)
    if tree.max_children > 1:  # siblings may hold the same token: accept only the first
        agrees = agrees & ~(agrees[:, None, :] & tree.earlier_siblings).any(-1)
    path, count = tree.follow(agrees)
    last = path.gather(1, count[:, None] - 1)
    return Verdict(path, count, sampled.gather(1, last)[:, 0], sampled=sampled)


@acceptance_rule(exact=True, topologies=("chain", "tree"), sequential_tokens=True, verify_tokens=verify_shared_tokens)
def shared_noise(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Exact, and identical to sequential decoding: accept a draft token if it equals the token that the shared noise selects.

    With the Gumbel noise G fixed per image and position, the token at a position *is* argmax(log p + G) (Maddison et al. 2014);
    a draft token is accepted exactly when it equals that token. With an empty draft this is sequential sampling. The draft
    probabilities q are not used. Arguments: see `AcceptanceRule`.
    """
    return verify_shared_tokens(noise.sample(probs, Purpose.TOKEN), draft)

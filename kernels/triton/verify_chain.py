"""Verification of a chain of drafts in one launch: exact or relaxed p / q acceptance, and the token after the accepted drafts.

`_verify_chain`, grid `(B,)`: a program owns one image. It gathers p and q of its T - 1 drafts, computes their uniforms, and
finds the first rejected draft, for all drafts in parallel. Then it reads the row of p (and q) at the end of the chain, and
samples from norm((p - q)+) with one uniform. Relaxed rules pass an acceptance probability for each draft. Its
excess over min(1, p / q) decays with the depth and is capped by the budget along the chain, as in
`vargen.decoding.relaxed_rules`. Nothing depends on the host.

Bytes moved: 8 V B for the rows to sample from, and a few for each draft.

Shape suffixes: B images, T fed tokens of the pass, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.triton.launch import launch
from vargen.kernels.triton.noise import make_noise_key, uniform32, uniform64
from vargen.kernels.triton.sample import choose_warps, validate_row_size
from vargen.kernels.triton.selection import sample_by_uniform

ACCEPT, RESIDUAL = tl.constexpr(1), tl.constexpr(2)  # of `vargen.decoding.noise.Purpose`


@triton.jit
def sample_residual(p, q, token, rejected, lane, noise, HAS_Q: tl.constexpr, BLOCK: tl.constexpr):
    """Sample from norm((p - q)+) if a draft was rejected, else from p; also from p if the residual is zero."""
    left = tl.maximum(p - q, 0.0) if HAS_Q else tl.where(lane == token, 0.0, p)
    target = tl.where(rejected & (tl.sum(left, 0) > 0), left, p)
    return sample_by_uniform(target, uniform64(noise), BLOCK)


@triton.jit(do_not_specialize=["T", "step"])
def _verify_chain(
    probs_ptr,  # float32 [B, T, V]
    q_ptr,  # float32 [B, T - 1, V]; not read without HAS_Q
    tokens_ptr,  # int64 [B, T - 1]
    valid_ptr,  # bool [B, T - 1]; not read without HAS_VALID
    accept_prob_ptr,  # float32 [B, T - 1]; this and the next are not read without RELAXED
    spent_ptr,  # float32 [B]
    seeds_ptr,  # int64 [B]
    position_ptr,  # int64 [B, T]
    count_ptr,  # int64 [B]
    next_ptr,  # int64 [B]
    relaxation_ptr,  # float32 [B], written with RELAXED
    T,
    step,
    budget,
    tightening,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_VALID: tl.constexpr,
    RELAXED: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK_T)
    there = draft < T - 1
    at = image * (T - 1) + draft
    token = tl.load(tokens_ptr + at, mask=there, other=0)
    p = tl.load(probs_ptr + (image * T + draft) * V + token, mask=there, other=0.0)
    q = tl.full([BLOCK_T], 1.0, dtype=tl.float32)
    if HAS_Q:
        q = tl.load(q_ptr + at * V + token, mask=there, other=1.0)
    allowed = there
    if HAS_VALID:
        allowed = there & (tl.load(valid_ptr + at, mask=there, other=0) != 0)
    seed = tl.load(seeds_ptr + image)
    u = uniform32(make_noise_key(seed, tl.load(position_ptr + image * T + draft, mask=there, other=0), ACCEPT, step))
    if RELAXED:
        exact = tl.where(q > 0, tl.minimum(tl.math.div_rn(p, tl.where(q > 0, q, 1.0)), 1.0), 0.0)
        accept_prob = tl.load(accept_prob_ptr + at, mask=there, other=0.0)
        allowance = tl.maximum(tl.minimum(accept_prob, 1.0) - exact, 0.0) * tl.exp(-tightening * draft.to(tl.float32))
        allowance = tl.where(allowed, allowance, 0.0)
        upto = tl.cumsum(allowance, 0)
        limit = tl.maximum(budget - tl.load(spent_ptr + image), 0.0)
        allowance = tl.where(upto <= limit, allowance, tl.maximum(limit - (upto - allowance), 0.0))
        accepted = allowed & (u < exact + allowance)
    else:
        accepted = allowed & (u * q < p)
    row = tl.min(tl.where(there & ~accepted, draft, T - 1), 0)
    tl.store(count_ptr + image, (row + 1).to(tl.int64))
    if RELAXED:
        tl.store(relaxation_ptr + image, tl.sum(tl.where(draft <= row, allowance, 0.0), 0))

    lane = tl.arange(0, BLOCK)
    target = tl.load((probs_ptr + (image * T + row) * V) + lane, mask=lane < V, other=0.0)
    last = image * (T - 1) + tl.minimum(row, tl.maximum(T - 2, 0))
    rejected = row < T - 1
    if HAS_VALID:
        rejected = rejected & (tl.load(valid_ptr + last, mask=rejected, other=0) != 0)
    proposed = target
    if HAS_Q:
        proposed = tl.load((q_ptr + last * V) + lane, mask=(lane < V) & rejected, other=0.0)
    rejected_token = tl.load(tokens_ptr + last, mask=rejected, other=-1).to(tl.int32)
    noise = make_noise_key(seed, tl.load(position_ptr + image * T + row), RESIDUAL, step)
    sampled = sample_residual(target, proposed, rejected_token, rejected, lane, noise, HAS_Q, BLOCK)
    tl.store(next_ptr + image, sampled.to(tl.int64))


class ChainVerdict(NamedTuple):
    """Verdicts of chains.

    Attributes:
        num_committed: int64 `[B]`, number of accepted slots, including the root.
        next_token: int64 `[B]`.
        relaxation: float32 `[B]`, for relaxed rules.
    """

    num_committed: Tensor
    next_token: Tensor
    relaxation: Tensor | None


def verify_chain(
    probs: Tensor,
    tokens: Tensor,
    q: Tensor | None,
    valid: Tensor | None,
    seeds: Tensor,
    position: Tensor,
    step: int | Tensor,
    *,
    accept_prob: Tensor | None = None,
    relaxation: Tensor | None = None,
    budget: float | None = None,
    tightening: float = 0.0,
) -> ChainVerdict:
    """Verify a chain, with the noise of `vargen.decoding.rules`.

    Args:
        probs: float32 `[B, T, V]`, target probabilities after each fed slot.
        tokens: int64 `[B, T - 1]`, drafted tokens.
        q: float32 `[B, T - 1, V]`, probabilities from which the drafts were sampled; None for deterministic drafts.
        valid: bool `[B, T - 1]`, which drafts are valid; None: all.
        seeds, position, step: int64 `[B]`, int64 `[B, T]` and the number of the pass.
        accept_prob: float32 `[B, T - 1]`, acceptance probabilities of a relaxed rule; None verifies exactly.
        relaxation: float32 `[B]`, relaxation spent by earlier passes; with `accept_prob`.
        budget, tightening: see `vargen.decoding.RelaxedRule`.

    Raises:
        ValueError: for a larger vocabulary than a program can hold.
    """
    B, T, V = probs.shape
    validate_row_size(V)
    count, next_token = (torch.empty(B, dtype=torch.int64, device=probs.device) for _ in range(2))
    spent = None if accept_prob is None else torch.empty(B, dtype=torch.float32, device=probs.device)
    given = [probs, q, tokens, valid, accept_prob, relaxation]
    launch(
        _verify_chain,
        (B,),
        *(probs if each is None else each.contiguous() for each in given),
        seeds.contiguous(),
        position.contiguous(),
        count,
        next_token,
        probs if spent is None else spent,
        T,
        step,
        float("inf") if budget is None else budget,
        tightening,
        V=V,
        BLOCK=triton.next_power_of_2(V),
        BLOCK_T=triton.next_power_of_2(max(T - 1, 1)),
        HAS_Q=q is not None,
        HAS_VALID=valid is not None,
        RELAXED=accept_prob is not None,
        num_warps=choose_warps(V),
        enable_fp_fusion=False,
    )
    return ChainVerdict(count, next_token, spent)

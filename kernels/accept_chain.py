"""Judging a chain of drafts: p / q acceptance, relaxed or not, and the draw behind the last accepted one, in one launch.

`_judge`, grid `(B,)`: a program owns one image. It gathers what p and q give its T - 1 drafts, makes their coins, and finds the
first refusal, all drafts at once; then it reads the one row of p, and of q, where the chain ends, and draws from norm((p - q)+)
by one coin. RelaxedRule rules hand in how likely they want each draft accepted (`accept_wanted`); what that is beyond min(1, p
/ q) is tapered with the depth, and capped by the budget along the chain, as `vargen.decoding.next_token.acceptance.relaxed`
has it. Nothing depends on the host.

Bytes moved: 8 V B for the rows of the draw, and a few for each draft.

Shape suffixes: B images, T fed tokens of the pass, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.counter_noise import coin, noise_key, unit
from vargen.kernels.launch import launch
from vargen.kernels.sampler import check_vocabulary, warps_for
from vargen.kernels.selection import drawn_by_coin

ACCEPT, RESIDUAL = tl.constexpr(1), tl.constexpr(2)  # of `vargen.decoding.noise.Purpose`


@triton.jit
def residual_draw(p, q, token, refused, lane, noise, HAS_Q: tl.constexpr, BLOCK: tl.constexpr):
    """A token from norm((p - q)+) where a draft was refused, else from p; from p where nothing is left of it."""
    left = tl.maximum(p - q, 0.0) if HAS_Q else tl.where(lane == token, 0.0, p)
    target = tl.where(refused & (tl.sum(left, 0) > 0), left, p)
    return drawn_by_coin(target, coin(noise), BLOCK)


@triton.jit(do_not_specialize=["T", "step"])
def _judge(
    probs_ptr,  # float32 [B, T, V]
    q_ptr,  # float32 [B, T - 1, V]; not read without HAS_Q
    tokens_ptr,  # int64 [B, T - 1]
    valid_ptr,  # bool [B, T - 1]; not read without HAS_VALID
    wanted_ptr,  # float32 [B, T - 1]; this and the next are not read without RELAXED
    spent_before_ptr,  # float32 [B]
    seeds_ptr,  # int64 [B]
    position_ptr,  # int64 [B, T]
    count_ptr,  # int64 [B]
    next_ptr,  # int64 [B]
    spent_ptr,  # float32 [B], written with RELAXED
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
    u = unit(noise_key(seed, tl.load(position_ptr + image * T + draft, mask=there, other=0), ACCEPT, step))
    if RELAXED:
        exact = tl.where(q > 0, tl.minimum(tl.math.div_rn(p, tl.where(q > 0, q, 1.0)), 1.0), 0.0)
        wanted = tl.load(wanted_ptr + at, mask=there, other=0.0)
        granted = tl.maximum(tl.minimum(wanted, 1.0) - exact, 0.0) * tl.exp(-tightening * draft.to(tl.float32))
        granted = tl.where(allowed, granted, 0.0)
        upto = tl.cumsum(granted, 0)
        limit = tl.maximum(budget - tl.load(spent_before_ptr + image), 0.0)
        granted = tl.where(upto <= limit, granted, tl.maximum(limit - (upto - granted), 0.0))
        accepted = allowed & (u < exact + granted)
    else:
        accepted = allowed & (u * q < p)
    row = tl.min(tl.where(there & ~accepted, draft, T - 1), 0)
    tl.store(count_ptr + image, (row + 1).to(tl.int64))
    if RELAXED:
        tl.store(spent_ptr + image, tl.sum(tl.where(draft <= row, granted, 0.0), 0))

    lane = tl.arange(0, BLOCK)
    target = tl.load((probs_ptr + (image * T + row) * V) + lane, mask=lane < V, other=0.0)
    last = image * (T - 1) + tl.minimum(row, tl.maximum(T - 2, 0))
    refused = row < T - 1
    if HAS_VALID:
        refused = refused & (tl.load(valid_ptr + last, mask=refused, other=0) != 0)
    proposed = target
    if HAS_Q:
        proposed = tl.load((q_ptr + last * V) + lane, mask=(lane < V) & refused, other=0.0)
    refused_token = tl.load(tokens_ptr + last, mask=refused, other=-1).to(tl.int32)
    noise = noise_key(seed, tl.load(position_ptr + image * T + row), RESIDUAL, step)
    drawn = residual_draw(target, proposed, refused_token, refused, lane, noise, HAS_Q, BLOCK)
    tl.store(next_ptr + image, drawn.to(tl.int64))


class ChainVerdict(NamedTuple):
    """`accepted` int64 `[B]`, slots, the root included; `next_token` int64 `[B]`; `relaxation` float32 `[B]`, of relaxed
    rules."""

    accepted: Tensor
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
    wanted: Tensor | None = None,
    relaxation: Tensor | None = None,
    budget: float | None = None,
    tightening: float = 0.0,
) -> ChainVerdict:
    """The verdict on a chain, with the noise of `vargen.decoding.next_token.acceptance.exact`.

    Args:
        probs: float32 `[B, T, V]`, the target's behind each fed slot.
        tokens: int64 `[B, T - 1]`, drafted.
        q: float32 `[B, T - 1, V]`, what they were drawn with; None: they were not drawn.
        valid: bool `[B, T - 1]`; None: all are.
        seeds, position, step: int64 `[B]`, int64 `[B, T]` and the number of the pass.
        wanted: float32 `[B, T - 1]`, chances of a relaxed rule; None judges exactly.
        relaxation: float32 `[B]`, granted by earlier passes; with `wanted`.
        budget, tightening: see `vargen.decoding.next_token.acceptance.RelaxedRule`.

    Raises:
        ValueError: for more tokens than a program holds.
    """
    B, T, V = probs.shape
    check_vocabulary(V)
    count, next_token = (torch.empty(B, dtype=torch.int64, device=probs.device) for _ in range(2))
    spent = None if wanted is None else torch.empty(B, dtype=torch.float32, device=probs.device)
    given = [probs, q, tokens, valid, wanted, relaxation]
    launch(
        _judge,
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
        RELAXED=wanted is not None,
        num_warps=warps_for(V),
        enable_fp_fusion=False,
    )
    return ChainVerdict(count, next_token, spent)

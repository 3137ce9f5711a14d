"""Acceptance probabilities of relaxed rules: total probability of a group of tokens (GSD) or of the nearest codes (LANTERN).

`_grouped`, grid `(S, B)`: a program owns one draft and holds its row of p. The group consists of the tokens ranked next above
and below the draft by probability; its borders are found by bisection, without sorting. Among equal probabilities at a border,
smaller token indices join first. `_neighborhood`, grid `(S, B)`: a program gathers p of the K nearest tokens of one draft, and
takes the longest prefix whose sum is within the bounds.

Bytes moved per draft: 8 V for a group (p and q), plus 4 C V with codes; 6 K and a few for a neighborhood.

Shape suffixes: B images, S drafts, V vocabulary, C code dimension, K neighbors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.launch import launch
from vargen.kernels.sampler import choose_warps, validate_row_size
from vargen.kernels.selection import find_border_key, to_ordered_key

_UNBOUNDED = 3.0e38  # finite: infinity times a probability of 0 is NaN


_PIECE = tl.constexpr(1024)  # elements of a row that are summed at a time


@triton.jit
def _in_border(value, candidate, border, ties, before):
    """Return which candidates are above a border or among the first `ties` equal to it, and the ties counted so far."""
    key = to_ordered_key(value, candidate)
    even = candidate & (key == border)
    number = before + tl.cumsum(even.to(tl.int32), 0)
    return (candidate & (key > border)) | (even & (number <= ties)), before + tl.sum(even.to(tl.int32), 0)


@triton.jit
def _grouped(
    p_ptr,  # float32 [B, S, V], by strides
    q_ptr,  # float32 [B, S, V]; not read without HAS_Q
    tokens_ptr,  # int64 [B, S]
    codes_ptr,  # float32 [C, V]; not read for C = 0
    accept_prob_ptr,  # float32 [B, S]
    stride_pb,
    stride_qb,
    below,
    above,
    delta,
    distance,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    draft, image = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < V
    at = image * tl.num_programs(0) + draft
    token = tl.load(tokens_ptr + at)
    p_ptr += image.to(tl.int64) * stride_pb + draft * V
    p = tl.load(p_ptr + lane, mask=inside, other=0.0)
    own = tl.load(p_ptr + token)
    other = inside & (lane != token)
    low, low_ties = find_border_key(p, other & (p <= own), below)
    high, high_ties = find_border_key(-p, other & (p > own), above)
    mass, proposed = own, 1.0
    q_ptr += image.to(tl.int64) * stride_qb + draft * V
    if HAS_Q:
        proposed = tl.load(q_ptr + token)
    low_seen, high_seen = 0, 0
    for first in range(0, V, _PIECE):
        member = first + tl.arange(0, _PIECE)
        x = tl.load(p_ptr + member, mask=member < V, other=0.0)
        some = (member < V) & (member != token)
        lower, low_seen = _in_border(x, some & (x <= own), low, low_ties, low_seen)
        higher, high_seen = _in_border(-x, some & (x > own), high, high_ties, high_seen)
        joins = (lower | higher) & (x > 0) & (x <= 1) & (tl.abs(x - own) < delta)
        if C > 0:
            gap = tl.zeros([_PIECE], dtype=tl.float32)
            for c in range(C):
                code = tl.load(codes_ptr + c * V + member, mask=member < V, other=0.0)
                apart = code - tl.load(codes_ptr + c * V + token)
                gap += apart * apart
            joins &= gap < distance
        mass += tl.sum(tl.where(joins, x, 0.0), 0)
        if HAS_Q:
            proposed += tl.sum(tl.load(q_ptr + member, mask=joins, other=0.0), 0)
    tl.store(accept_prob_ptr + at, tl.where(proposed > 0, mass / tl.where(proposed > 0, proposed, 1.0), 0.0))


@triton.jit
def _neighborhood(
    p_ptr,  # float32 [B, S, V], by strides
    q_ptr,  # float32 [B, S, V]; not read without HAS_Q
    tokens_ptr,  # int64 [B, S]
    nearest_ptr,  # int16 or int32 [V, K]
    accept_prob_ptr,  # float32 [B, S]
    stride_pb,
    stride_qb,
    ratio,
    delta,
    V: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    draft, image = tl.program_id(0), tl.program_id(1)
    near = tl.arange(0, BLOCK_K)
    at = image * tl.num_programs(0) + draft
    token = tl.load(tokens_ptr + at)
    p_ptr += image.to(tl.int64) * stride_pb + draft * V
    own = tl.load(p_ptr + token)
    neighbor = tl.load(nearest_ptr + token * K + near, mask=near < K, other=0).to(tl.int32)
    reached = tl.cumsum(tl.load(p_ptr + neighbor, mask=near < K, other=0.0), 0)
    within = (near < K) & (reached <= (ratio - 1.0) * own) & (reached <= delta)
    mass = tl.max(tl.where(within, reached, 0.0), 0)
    proposed = 1.0
    if HAS_Q:
        proposed = tl.maximum(tl.load(q_ptr + image.to(tl.int64) * stride_qb + draft * V + token), 1e-30)
    tl.store(accept_prob_ptr + at, tl.where(own > 0, (own + mass) / proposed, 0.0))


def _rows(probs: Tensor) -> Tensor:
    """Return `[B, S, V]` with contiguous rows within each image."""
    return probs if probs.stride(2) == 1 and probs.stride(1) == probs.shape[2] else probs.contiguous()


def grouped_accept_prob(
    p: Tensor, q: Tensor | None, tokens: Tensor, size: int, delta: float, distance: float | None, codes_CV: Tensor | None
) -> Tensor:
    """Acceptance probabilities of `vargen.decoding.next_token.acceptance.GroupedRule`, float32 `[B, S]`, which may exceed 1.

    Args:
        p, q: float32 `[B, S, V]`, target and draft probabilities of each draft; q is None for deterministic drafts.
        tokens: int64 `[B, S]`, drafted tokens.
        size, delta, distance: see `GroupedRule`.
        codes_CV: the transposed codebook; with `distance`.

    Raises:
        ValueError: for a larger vocabulary than a program can hold.
    """
    B, S, V = p.shape
    validate_row_size(V)
    accept_prob = torch.empty(B, S, dtype=torch.float32, device=p.device)
    p, q = _rows(p), None if q is None else _rows(q)
    coded = distance is not None and codes_CV is not None
    if B * S:
        launch(
            _grouped,
            (S, B),
            p,
            p if q is None else q,
            tokens.contiguous(),
            codes_CV.contiguous() if coded and codes_CV is not None else p,
            accept_prob,
            p.stride(0),
            p.stride(0) if q is None else q.stride(0),
            min((size + 1) // 2, V - 1),
            min(size // 2, V - 1),
            delta,
            0.0 if distance is None else distance,
            V=V,
            BLOCK=triton.next_power_of_2(V),
            C=codes_CV.shape[0] if coded and codes_CV is not None else 0,
            HAS_Q=q is not None,
            num_warps=choose_warps(V),
        )
    return accept_prob


def neighborhood_accept_prob(
    p: Tensor, q: Tensor | None, tokens: Tensor, nearest_VK: Tensor, ratio: float | None, delta: float | None
) -> Tensor:
    """Acceptance probabilities of `vargen.decoding.next_token.acceptance.NeighborhoodRule`, float32 `[B, S]`; may exceed 1.

    Args:
        p, q, tokens: as in `grouped_accept_prob`.
        nearest_VK: int16 or int32, the K nearest tokens of each token, nearest first.
        ratio, delta: bounds of the total probability; None for no bound.
    """
    B, S, V = p.shape
    K = nearest_VK.shape[1]
    accept_prob = torch.empty(B, S, dtype=torch.float32, device=p.device)
    p, q = _rows(p), None if q is None else _rows(q)
    if B * S:
        launch(
            _neighborhood,
            (S, B),
            p,
            p if q is None else q,
            tokens.contiguous(),
            nearest_VK.contiguous(),
            accept_prob,
            p.stride(0),
            p.stride(0) if q is None else q.stride(0),
            _UNBOUNDED if ratio is None else ratio,
            _UNBOUNDED if delta is None else delta,
            V=V,
            K=K,
            BLOCK_K=triton.next_power_of_2(K),
            HAS_Q=q is not None,
            num_warps=4,
        )
    return accept_prob

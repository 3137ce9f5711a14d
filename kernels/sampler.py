"""Sampling from logits in one launch: guidance, temperature, top-k, top-p, softmax and the choice of a token, in this order.

`_sample`, grid `(rows,)`: a program owns one row of V logits (and the corresponding unconditional row) and keeps it in
registers. The thresholds of the filters are found exactly by bisection, without sorting. Ties are kept: all logits equal to the
k-th largest, and all equal to the one at which the sum of the k most probable exceeds p, as in
`vargen.decoding.sampling.filter_logits`. The token is sampled by Gumbel-max, argmax p / E, with the counter-based noise
of (seed, position, purpose, step); ties go to the smallest index. For this the row is read again in pieces, from a cache,
because noise for the whole row would not fit in registers.

NaN and infinite logits have probability 0 and are never sampled. Their row is flagged, so that the caller can reject it. A row
without finite logits gets probabilities of 0 and token 0.

`_gumbel_max`, grid `(rows,)`: the same sampling from given probabilities.

Bytes moved per row: V logits once (twice under guidance), and 4 V for probabilities if requested.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.counter_noise import exponential_from_key, make_noise_key
from vargen.kernels.dispatch import MAX_VOCAB
from vargen.kernels.launch import launch
from vargen.kernels.selection import find_kth_key, find_mass_key, to_ordered_key

_LOG2E = tl.constexpr(1.4426950408889634)
_PIECE = tl.constexpr(1024)  # elements of a row for which noise is computed at a time


@triton.jit
def _scale_logits(logits_ptr, unconditional_ptr, at, inside, scale, temperature, GUIDED: tl.constexpr):
    """Guided logits divided by the temperature, float32."""
    z = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if GUIDED:
        u = tl.load(unconditional_ptr + at, mask=inside, other=0.0).to(tl.float32)
        z = u + scale * (z - u)
    return tl.math.div_rn(z, temperature + tl.zeros_like(z))


@triton.jit
def _update_best(ratio, first, best, token):
    """Update the maximum with the piece that begins at token `first`."""
    piece = tl.max(ratio, 0)
    return tl.maximum(best, piece), tl.where(piece > best, first + tl.argmax(ratio, 0), token)


@triton.jit(do_not_specialize=["T", "step", "k"])
def _sample(
    logits_ptr,  # [rows, V]
    unconditional_ptr,  # [rows, V]; not read without GUIDED
    seeds_ptr,  # int64 [rows / T]; this and the next are not read without SAMPLE
    position_ptr,  # int64 [rows]
    probs_ptr,  # float32 [rows, V], written with WRITE_PROBS
    token_ptr,  # int64 [rows], written with SAMPLE
    non_finite_ptr,  # int32 [rows]
    T,
    step,
    scale,
    temperature,
    k,
    p,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    GUIDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    WRITE_PROBS: tl.constexpr,
    SAMPLE: tl.constexpr,
    PURPOSE: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < V
    begin = row.to(tl.int64) * V
    z = _scale_logits(logits_ptr, unconditional_ptr, begin + lane, inside, scale, temperature, GUIDED)
    finite = tl.abs(z) < float("inf")  # False for NaN
    tl.store(non_finite_ptr + row, tl.max((~finite & inside).to(tl.int32), 0))
    z = tl.where(finite & inside, z, float("-inf"))
    most = tl.max(z, 0)
    most = tl.where(most > float("-inf"), most, 0.0)
    weight = tl.exp2((z - most) * _LOG2E)

    least = -0x7FFFFFFF
    if TOP_K or TOP_P:
        key = to_ordered_key(z, inside)
        least = tl.min(tl.where(inside, key, 0x7FFFFFFF), 0)
        total = tl.sum(weight, 0)
        if TOP_K:
            least = find_kth_key(key, k)
            if TOP_P:  # total of exactly k values, without extra ties
                above = key > least
                some = tl.max(tl.where(key == least, weight, 0.0), 0)
                total = tl.sum(tl.where(above, weight, 0.0), 0) + (k - tl.sum(above.to(tl.int32), 0)) * some
        if TOP_P:
            least = find_mass_key(key, weight, least, p * total)
        weight = tl.where(key >= least, weight, 0.0)

    total = tl.sum(weight, 0)
    total = tl.where(total > 0, total, 1.0)
    if WRITE_PROBS:
        tl.store(probs_ptr + begin + lane, weight / total, mask=inside)
    if SAMPLE:
        noise_key = make_noise_key(tl.load(seeds_ptr + row // T), tl.load(position_ptr + row), PURPOSE, step)
        best, token = -1.0, 0
        for first in range(0, V, _PIECE):
            at = first + tl.arange(0, _PIECE)
            there = at < V
            x = _scale_logits(logits_ptr, unconditional_ptr, begin + at, there, scale, temperature, GUIDED)
            kept = there & (tl.abs(x) < float("inf"))
            if TOP_K or TOP_P:
                kept &= to_ordered_key(x, there) >= least
            won = tl.exp2((tl.where(kept, x, float("-inf")) - most) * _LOG2E) / total / exponential_from_key(noise_key, at)
            best, token = _update_best(tl.where(there, won, -1.0), first, best, token)
        tl.store(token_ptr + row, token)


@triton.jit(do_not_specialize=["T", "step"])
def _gumbel_max(
    probs_ptr,  # float32 [rows, V]
    seeds_ptr,  # int64 [rows / T]
    position_ptr,  # int64 [rows]
    token_ptr,  # int64 [rows]
    T,
    step,
    V: tl.constexpr,
    PURPOSE: tl.constexpr,
):
    row = tl.program_id(0)
    key = make_noise_key(tl.load(seeds_ptr + row // T), tl.load(position_ptr + row), PURPOSE, step)
    best, token = -1.0, 0
    for first in range(0, V, _PIECE):
        lane = first + tl.arange(0, _PIECE)
        probs = tl.load(probs_ptr + row.to(tl.int64) * V + lane, mask=lane < V, other=-1.0)
        ratio = tl.where(probs == probs, probs, 0.0) / exponential_from_key(key, lane)
        best, token = _update_best(tl.where(lane < V, ratio, -1.0), first, best, token)
    tl.store(token_ptr + row, token)


class SampleResult(NamedTuple):
    """`probs` float32 `[..., V]` and `tokens` int64 `[...]`, None if not requested; `non_finite` int32 `[...]`, 1 where a
    logit is NaN or infinite."""

    probs: Tensor | None
    tokens: Tensor | None
    non_finite: Tensor


class NoiseStream(NamedTuple):
    """Keys of the noise for sampling: `seeds` int64 `[B]`, `position` int64 `[B, T]`, the number of the purpose, and the number
    of the pass, which can be an int64 scalar on the device."""

    seeds: Tensor
    position: Tensor
    purpose: int
    step: int | Tensor = 0


def choose_warps(V: int) -> int:
    """Warps of a program that holds a row of V numbers: at least 8, and the fewest without register spills."""
    return 8 if V <= 8192 else 16


def validate_row_size(V: int) -> None:
    """Raise ValueError if a program cannot hold a row of V elements."""
    if not 1 <= V <= MAX_VOCAB:
        raise ValueError(f"kernels hold rows of at most {MAX_VOCAB} tokens, got {V}; VARGEN_KERNELS=reference has none")


def sample_from_logits(
    logits: Tensor,
    unconditional: Tensor | None = None,
    scale: float = 1.0,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    noise: NoiseStream | None = None,
    probs: bool = True,
) -> SampleResult:
    """Compute the probabilities of logits `[..., V]` of any float dtype and, with `noise`, sample a token from each row.

    Args:
        unconditional: logits of the same shape and dtype, for guidance u + scale (c - u).
        temperature, top_k, top_p: above 0; from 1 to V, or None to keep all tokens; in (0, 1].
        noise: noise keys for `[B, T]` rows; logits are then `[B, T, V]`.
        probs: whether to return probabilities.

    Raises:
        ValueError: for a larger vocabulary than a program can hold.
    """
    V = logits.shape[-1]
    validate_row_size(V)
    given = logits.contiguous()
    other = given if unconditional is None else unconditional.contiguous()
    shape, rows = logits.shape[:-1], given.numel() // V
    non_finite = torch.empty(shape, dtype=torch.int32, device=given.device)
    made = torch.empty(*shape, V, dtype=torch.float32, device=given.device) if probs else None
    tokens = None if noise is None else torch.empty(shape, dtype=torch.int64, device=given.device)
    if rows:
        launch(
            _sample,
            (rows,),
            given,
            other,
            non_finite if noise is None else noise.seeds.contiguous(),
            non_finite if noise is None else noise.position.contiguous(),
            non_finite if made is None else made,
            non_finite if tokens is None else tokens,
            non_finite,
            1 if noise is None else noise.position.shape[-1],
            0 if noise is None else noise.step,
            scale,
            temperature,
            V if top_k is None else top_k,
            top_p,
            V=V,
            BLOCK=triton.next_power_of_2(V),
            GUIDED=unconditional is not None,
            TOP_K=top_k is not None and top_k < V,
            TOP_P=top_p < 1.0,
            WRITE_PROBS=probs,
            SAMPLE=noise is not None,
            PURPOSE=0 if noise is None else int(noise.purpose),
            num_warps=choose_warps(V),
            enable_fp_fusion=False,  # fusion would round the noise differently
        )
    return SampleResult(made, tokens, non_finite)


def sample_gumbel_max(probs: Tensor, noise: NoiseStream) -> Tensor:
    """Sample tokens int64 `[B, T]` from float32 weights `[B, T, V]`, which need not sum to 1, as `vargen.decoding.noise` does.

    Raises:
        ValueError: for a larger vocabulary than a program can hold.
    """
    V = probs.shape[-1]
    validate_row_size(V)
    tokens = torch.empty(probs.shape[:-1], dtype=torch.int64, device=probs.device)
    if tokens.numel():
        launch(
            _gumbel_max,
            (tokens.numel(),),
            probs.contiguous(),
            noise.seeds.contiguous(),
            noise.position.contiguous(),
            tokens,
            noise.position.shape[-1],
            noise.step,
            V=V,
            PURPOSE=int(noise.purpose),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return tokens

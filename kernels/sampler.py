"""Sampling from logits in one launch: guidance, temperature, top-k, top-p, softmax and the choice of a token, in this order.

`_sample`, grid `(rows,)`: a program owns one row of V logits (and the corresponding unconditional row) and keeps it in
registers. The thresholds of the filters are found exactly by bisection, without sorting. Ties are kept: all logits equal to the
k-th largest, and all equal to the one at which the sum of the k most probable exceeds p, as in
`vargen.decoding.sampling.filter_logits`. The token is the winner of the Gumbel race, argmax p / E, with the counter-based noise
of (seed, position, purpose, step); ties go to the smallest index. For the race the row is read again in pieces, from a cache,
because noise for the whole row would not fit in registers.

NaN and infinite logits have probability 0 and are never sampled. Their row is flagged, so that the caller can reject it. A row
without finite logits gets probabilities of 0 and token 0.

`_race`, grid `(rows,)`: the same sampling from given probabilities.

Bytes moved per row: V logits once (twice under guidance), and 4 V for probabilities if requested.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.counter_noise import exponential, noise_key
from vargen.kernels.dispatch import MAX_VOCAB
from vargen.kernels.launch import launch
from vargen.kernels.selection import kth_key, mass_key, ordered_key

_LOG2E = tl.constexpr(1.4426950408889634)
_PIECE = tl.constexpr(1024)  # elements of a row for which noise is computed at a time


@triton.jit
def _scaled(logits_ptr, unconditional_ptr, at, inside, scale, temperature, GUIDED: tl.constexpr):
    """Guided logits divided by the temperature, float32."""
    z = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if GUIDED:
        u = tl.load(unconditional_ptr + at, mask=inside, other=0.0).to(tl.float32)
        z = u + scale * (z - u)
    return tl.math.div_rn(z, temperature + tl.zeros_like(z))


@triton.jit
def _better(ratio, first, best, token):
    """Update the winner of the race with the piece that begins at token `first`."""
    piece = tl.max(ratio, 0)
    return tl.maximum(best, piece), tl.where(piece > best, first + tl.argmax(ratio, 0), token)


@triton.jit(do_not_specialize=["T", "step", "k"])
def _sample(
    logits_ptr,  # [rows, V]
    unconditional_ptr,  # [rows, V]; not read without GUIDED
    seeds_ptr,  # int64 [rows / T]; this and the next are not read without DRAW
    position_ptr,  # int64 [rows]
    probs_ptr,  # float32 [rows, V], written with WRITE_PROBS
    token_ptr,  # int64 [rows], written with DRAW
    bad_ptr,  # int32 [rows]
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
    DRAW: tl.constexpr,
    PURPOSE: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < V
    begin = row.to(tl.int64) * V
    z = _scaled(logits_ptr, unconditional_ptr, begin + lane, inside, scale, temperature, GUIDED)
    finite = tl.abs(z) < float("inf")  # False for NaN
    tl.store(bad_ptr + row, tl.max((~finite & inside).to(tl.int32), 0))
    z = tl.where(finite & inside, z, float("-inf"))
    most = tl.max(z, 0)
    most = tl.where(most > float("-inf"), most, 0.0)
    weight = tl.exp2((z - most) * _LOG2E)

    least = -0x7FFFFFFF
    if TOP_K or TOP_P:
        key = ordered_key(z, inside)
        least = tl.min(tl.where(inside, key, 0x7FFFFFFF), 0)
        total = tl.sum(weight, 0)
        if TOP_K:
            least = kth_key(key, k)
            if TOP_P:  # total of exactly k values, without extra ties
                above = key > least
                some = tl.max(tl.where(key == least, weight, 0.0), 0)
                total = tl.sum(tl.where(above, weight, 0.0), 0) + (k - tl.sum(above.to(tl.int32), 0)) * some
        if TOP_P:
            least = mass_key(key, weight, least, p * total)
        weight = tl.where(key >= least, weight, 0.0)

    total = tl.sum(weight, 0)
    total = tl.where(total > 0, total, 1.0)
    if WRITE_PROBS:
        tl.store(probs_ptr + begin + lane, weight / total, mask=inside)
    if DRAW:
        noise = noise_key(tl.load(seeds_ptr + row // T), tl.load(position_ptr + row), PURPOSE, step)
        best, token = -1.0, 0
        for first in range(0, V, _PIECE):
            at = first + tl.arange(0, _PIECE)
            there = at < V
            x = _scaled(logits_ptr, unconditional_ptr, begin + at, there, scale, temperature, GUIDED)
            kept = there & (tl.abs(x) < float("inf"))
            if TOP_K or TOP_P:
                kept &= ordered_key(x, there) >= least
            won = tl.exp2((tl.where(kept, x, float("-inf")) - most) * _LOG2E) / total / exponential(noise, at)
            best, token = _better(tl.where(there, won, -1.0), first, best, token)
        tl.store(token_ptr + row, token)


@triton.jit(do_not_specialize=["T", "step"])
def _race(
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
    key = noise_key(tl.load(seeds_ptr + row // T), tl.load(position_ptr + row), PURPOSE, step)
    best, token = -1.0, 0
    for first in range(0, V, _PIECE):
        lane = first + tl.arange(0, _PIECE)
        probs = tl.load(probs_ptr + row.to(tl.int64) * V + lane, mask=lane < V, other=-1.0)
        ratio = tl.where(probs == probs, probs, 0.0) / exponential(key, lane)
        best, token = _better(tl.where(lane < V, ratio, -1.0), first, best, token)
    tl.store(token_ptr + row, token)


class Sampled(NamedTuple):
    """`probs` float32 `[..., V]` and `tokens` int64 `[...]`, None if not requested; `bad` int32 `[...]`, 1 where a
    logit is NaN or infinite."""

    probs: Tensor | None
    tokens: Tensor | None
    bad: Tensor


class Coins(NamedTuple):
    """Keys of the noise for sampling: `seeds` int64 `[B]`, `position` int64 `[B, T]`, the number of the purpose, and the number
    of the pass, which can be an int64 scalar on the device."""

    seeds: Tensor
    position: Tensor
    purpose: int
    step: int | Tensor = 0


def warps_for(V: int) -> int:
    """Warps of a program that holds a row of V numbers: at least 8, and the fewest without register spills."""
    return 8 if V <= 8192 else 16


def check_vocabulary(V: int) -> None:
    """Raise ValueError if a program cannot hold a row of V elements."""
    if not 1 <= V <= MAX_VOCAB:
        raise ValueError(f"kernels hold rows of at most {MAX_VOCAB} tokens, got {V}; VARGEN_KERNELS=reference has none")


def sample(
    logits: Tensor,
    unconditional: Tensor | None = None,
    scale: float = 1.0,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    coins: Coins | None = None,
    probs: bool = True,
) -> Sampled:
    """Compute the probabilities of logits `[..., V]` of any float dtype and, with `coins`, sample a token from each row.

    Args:
        unconditional: logits of the same shape and dtype, for guidance u + scale (c - u).
        temperature: above 0.
        top_k: from 1 to V; None keeps all tokens.
        top_p: in (0, 1].
        coins: noise keys for `[B, T]` rows; logits are then `[B, T, V]`.
        probs: whether to return probabilities.

    Raises:
        ValueError: for a larger vocabulary than a program can hold.
    """
    V = logits.shape[-1]
    check_vocabulary(V)
    given = logits.contiguous()
    other = given if unconditional is None else unconditional.contiguous()
    shape, rows = logits.shape[:-1], given.numel() // V
    bad = torch.empty(shape, dtype=torch.int32, device=given.device)
    made = torch.empty(*shape, V, dtype=torch.float32, device=given.device) if probs else None
    tokens = None if coins is None else torch.empty(shape, dtype=torch.int64, device=given.device)
    if rows:
        launch(
            _sample,
            (rows,),
            given,
            other,
            bad if coins is None else coins.seeds.contiguous(),
            bad if coins is None else coins.position.contiguous(),
            bad if made is None else made,
            bad if tokens is None else tokens,
            bad,
            1 if coins is None else coins.position.shape[-1],
            0 if coins is None else coins.step,
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
            DRAW=coins is not None,
            PURPOSE=0 if coins is None else int(coins.purpose),
            num_warps=warps_for(V),
            enable_fp_fusion=False,  # fusion would round the noise differently
        )
    return Sampled(made, tokens, bad)


def race(probs: Tensor, coins: Coins) -> Tensor:
    """Sample tokens int64 `[B, T]` from float32 weights `[B, T, V]`, not necessarily normalized: `vargen.decoding.noise.race`.

    Raises:
        ValueError: for a larger vocabulary than a program can hold.
    """
    V = probs.shape[-1]
    check_vocabulary(V)
    tokens = torch.empty(probs.shape[:-1], dtype=torch.int64, device=probs.device)
    if tokens.numel():
        launch(
            _race,
            (tokens.numel(),),
            probs.contiguous(),
            coins.seeds.contiguous(),
            coins.position.contiguous(),
            tokens,
            coins.position.shape[-1],
            coins.step,
            V=V,
            PURPOSE=int(coins.purpose),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return tokens

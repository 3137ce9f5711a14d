"""Probabilities from logits in one launch: temperature, top-k, top-p and softmax, in this order; and Gumbel-max sampling.

`_filter`, grid `(rows,)`: a program owns one row of V logits and keeps it in registers. The thresholds of the filters are found
exactly by bisection, without sorting. Ties are kept: all logits equal to the k-th largest, and all equal to the one at which
the sum of the k most probable exceeds p, as in `vargen.kernels.ops.filter_logits`.

NaN and infinite logits have probability 0. A row without finite logits gets probabilities of 0.

`_gumbel_max`, grid `(rows,)`: the token argmax p / E, with the counter-based noise of (seed, position, purpose, step); ties go
to the smallest index.

Bytes moved per row: V logits once, and 4 V for probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.dispatch import MAX_VOCAB
from vargen.kernels.triton.launch import launch
from vargen.kernels.triton.noise import exponential_from_key, make_noise_key
from vargen.kernels.triton.selection import find_kth_key, find_mass_key, to_ordered_key

_LOG2E = tl.constexpr(1.4426950408889634)
_PIECE = tl.constexpr(1024)  # elements of a row for which noise is computed at a time


@triton.jit
def _update_best(ratio, first, best, token):
    """Update the maximum with the piece that begins at token `first`."""
    piece = tl.max(ratio, 0)
    return tl.maximum(best, piece), tl.where(piece > best, first + tl.argmax(ratio, 0), token)


@triton.jit(do_not_specialize=["T"])
def _filter(
    logits_ptr,  # [rows, V]
    probs_ptr,  # float32 [rows, V]
    temperature_ptr,  # float32 [rows / T]
    k_ptr,  # int64 [rows / T]
    p_ptr,  # float64 [rows / T]
    T,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERS: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row // T)
    lane = tl.arange(0, BLOCK)
    inside = lane < V
    begin = row.to(tl.int64) * V
    z = tl.load(logits_ptr + begin + lane, mask=inside, other=0.0).to(tl.float32)
    z = tl.math.div_rn(z, temperature + tl.zeros_like(z))
    finite = tl.abs(z) < float("inf")  # False for NaN
    z = tl.where(finite & inside, z, float("-inf"))
    most = tl.max(z, 0)
    most = tl.where(most > float("-inf"), most, 0.0)
    weight = tl.exp2((z - most) * _LOG2E)

    if FILTERS:
        key = to_ordered_key(z, inside)
        k, p = tl.load(k_ptr + row // T).to(tl.int32), tl.load(p_ptr + row // T).to(tl.float32)
        least = find_kth_key(key, k)
        some = tl.max(tl.where(key == least, weight, 0.0), 0)
        above = key > least
        total = tl.sum(tl.where(above, weight, 0.0), 0)
        total += (k - tl.sum(above.to(tl.int32), 0)) * some  # of exactly k values, without extra ties
        least = find_mass_key(key, weight, least, p * total)
        weight = tl.where(key >= least, weight, 0.0)

    total = tl.sum(weight, 0)
    total = tl.where(total > 0, total, 1.0)
    tl.store(probs_ptr + begin + lane, weight / total, mask=inside)


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


def probs_from_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, filters: bool) -> Tensor:
    """Return the probabilities, float32 `[B, T, V]`, of logits `[B, T, V]` of any float dtype.

    Args:
        temperature, top_k, top_p: float32, int64 and float64, B values each: above 0; from 1 to V; above 0, where 1 and more
            keeps all tokens but those of rounded sums, and 2 all.
        filters: whether any image has a filter; otherwise `top_k` and `top_p` are not read.
    """
    B, T, V = logits.shape
    validate_row_size(V)
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if B * T:
        launch(
            _filter,
            (B * T,),
            logits.contiguous(),
            probs,
            temperature,
            top_k,
            top_p,
            T,
            V=V,
            BLOCK=triton.next_power_of_2(V),
            FILTERS=filters,
            num_warps=choose_warps(V),
            enable_fp_fusion=False,
        )
    return probs


def sample_gumbel_max(probs: Tensor, noise: NoiseStream) -> Tensor:
    """Sample tokens int64 `[B, T]` from float32 weights `[B, T, V]`, which need not sum to 1; see `vargen.kernels.ops`."""
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

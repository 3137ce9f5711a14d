"""Sampling from rows of V logits or probabilities, and the noise and the selection that kernels share.

`_filter`, grid `(rows,)`: temperature, top-k, top-p, min-p and softmax, in this order. A program owns one row of V logits and
keeps it in registers. The thresholds of the filters are found exactly by bisection, without sorting: float32 values are ordered
like the integers of their bits, if the bits of negative values are inverted, so at most 32 steps over these integers find the
k-th largest. Ties are kept: all logits equal to the k-th largest, and all equal to the one at which the sum of the k most
probable exceeds p, as in `vargen.kernels.ops.filter_logits`. NaN and infinite logits have probability 0. A row without finite
logits gets probabilities of 0.

`_gumbel_max`, grid `(rows,)`: the token argmax p / E, with the noise that all passes share; ties go to the smallest index.

Bytes moved per row: V logits once, and 4 V for probabilities.

The noise is that of `vargen.kernels.noise_bits` in pass 0; the seeds of other passes are those of `Noise.key`. `uniform32` and
`uniform64` round only once, so they are bit-equal to torch's unless the compiler fuses multiplications and additions: kernels
that use them are launched with `enable_fp_fusion=False`. Exponentials take a logarithm, which torch computes differently on
each device. Here it is a fixed sequence of IEEE operations, within 3 units in the last place of torch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.dispatch import launch

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)
_GOLDEN32 = tl.constexpr(0x9E3779B9)
_LOW1 = tl.constexpr(0x7FEB352D)
_LOW2 = tl.constexpr(0x846CA68B)
_UNIT = tl.constexpr(2.0**-31 * (1 - 2.0**-24))
_HALF_UNIT = tl.constexpr(2.0**-32 * (1 - 2.0**-24))
_LN2_HIGH = tl.constexpr(0.693145751953125)  # 17 bits, so that products with exponents are exact
_LN2_LOW = tl.constexpr(1.4286068203094172e-06)
TOKEN, ACCEPT, RESIDUAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # of `vargen.decoding.noise.Purpose`
BRANCH = tl.constexpr(1 << 32)  # offset between the streams of several samples at one position
_ALL = tl.constexpr(0x7FFFFFFF)
PADDING_KEY = tl.constexpr(-0x80000000)  # below the key of every number, -inf included
_LOG2E = tl.constexpr(1.4426950408889634)
_PIECE = tl.constexpr(1024)  # elements of a row for which noise is computed at a time

# -- noise ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(z):
    z ^= z >> 30
    z *= _MIX1
    z ^= z >> 27
    z *= _MIX2
    return z ^ (z >> 31)


@triton.jit
def make_noise_key(seed, position, PURPOSE: tl.constexpr):
    """Return the uint64 key of a stream of pass 0; `seed` and `position` are int64 of broadcastable shapes."""
    key = _mix(seed.to(tl.uint64, bitcast=True) + tl.full([], PURPOSE + 1, tl.uint64) * _GOLDEN)
    return _mix(key + (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN)


@triton.jit
def _bits_to_uniform32(bits):
    return (bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * _UNIT + _HALF_UNIT


@triton.jit
def uniform32(key):
    """float32 in (0, 1): `noise_bits.uniform_of_keys`."""
    return _bits_to_uniform32((key >> 32).to(tl.uint32))


@triton.jit
def uniform64(key):
    """float64 in (0, 1), with 52 random bits: `noise_bits.uniform64_of_keys`."""
    return ((key >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.0**-52


@triton.jit
def lane_uniforms(key, lane):
    """float32 in (0, 1), one per lane (token) of a key: the uniforms of `noise_bits.exponential_of_keys`."""
    z = (lane + 1).to(tl.uint32) * _GOLDEN32 + key.to(tl.uint32)
    z ^= z >> 16
    z *= _LOW1
    z ^= (key >> 32).to(tl.uint32)
    z ^= z >> 15
    z *= _LOW2
    z ^= z >> 16
    return _bits_to_uniform32(z)


@triton.jit
def exponential_from_uniform(u):
    """-log(1 - u) of float32 u in (0, 1), accurate down to the smallest u, which decide Gumbel-max sampling.

    log(m 2^e) = e log 2 + 2 atanh(s) with s = (m - 1) / (m + 1) and m in [0.75, 1.5). Then |s| <= 0.2, and the error of six
    terms of the series is below half a unit in the last place. For u < 0.25 the exponent is 0 and m - 1 is exactly -u, so the
    rounding of 1 - u does not matter.
    """
    rest = 1.0 - u
    bits = rest.to(tl.int32, bitcast=True)
    exponent = tl.where(u < 0.25, 0, (bits - 0x3F400000) >> 23)
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    f = tl.where(u < 0.25, -u, m - 1.0)
    lost = tl.where(u < 0.25, 0.0, tl.math.div_rn((1.0 - rest) - u, rest))  # rounding error of 1 - u
    s = tl.math.div_rn(f, f + 2.0)
    z = s * s
    series = z * (0.6666667 + z * (0.4 + z * (0.2857143 + z * (0.22222222 + z * (0.18181819 + z * 0.15384616)))))
    # 2 s = f - s f, where the larger term f is exact.
    small = s * (series - f) + (exponent.to(tl.float32) * _LN2_LOW + lost)
    return -((small + f) + exponent.to(tl.float32) * _LN2_HIGH)


@triton.jit
def exponential_from_key(key, lane):
    """Exponential(1) noise, float32 > 0, one per lane (token) of a key: `noise_bits.exponential_of_keys`."""
    return exponential_from_uniform(lane_uniforms(key, lane))


# -- selection without sorting -------------------------------------------------------------------------------------------------


@triton.jit
def to_ordered_key(x, inside):
    """int32 keys with the order of float32 `x` without NaN; equal values, including 0 and -0, have equal keys."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(inside, bits ^ ((bits >> 31) & _ALL), PADDING_KEY)


@triton.jit
def find_kth_key(key, k):
    """The k-th largest key, given at least k keys inside: the largest t such that at least k keys are >= t."""
    low = tl.min(tl.where(key == PADDING_KEY, _ALL, key), 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64) + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        reaching = key >= middle.to(tl.int32)
        count = tl.sum(reaching.to(tl.int32), 0)
        if count == k:  # these are the k largest
            low = tl.min(tl.where(reaching, key, _ALL), 0).to(tl.int64)
            high = low + 1
        elif count > k:
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def find_mass_key(key, weight, least, target):
    """The largest key t above `least` such that the keys >= t have a total weight above `target`; `least` if there is none."""
    low = least.to(tl.int64)
    high = tl.max(key, 0).to(tl.int64) + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        if tl.sum(tl.where(key >= middle.to(tl.int32), weight, 0.0), 0) > target:
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def sample_by_uniform(weight, uniform, BLOCK: tl.constexpr):
    """Sample a lane with probability weight / sum(weight) by a uniform in (0, 1), never one of weight 0 unless all are.

    It takes two steps, as in `vargen.kernels.ops`: cumulative sums over pieces, then within one piece.
    """
    INNER: tl.constexpr = 64 if BLOCK > 64 else BLOCK
    pieces = tl.reshape(weight, (BLOCK // INNER, INNER))
    sums = tl.sum(pieces, 1)
    number, lane = tl.arange(0, BLOCK // INNER), tl.arange(0, INNER)
    upto = tl.cumsum(sums.to(tl.float64), 0)
    target = uniform * tl.max(upto, 0)
    piece = _first_exceeding(upto, sums, target, number, BLOCK // INNER)
    chosen = tl.sum(tl.where((number == piece)[:, None], pieces, 0.0), 0)
    target -= tl.sum(tl.where(number < piece, sums, 0.0).to(tl.float64), 0)
    return piece * INNER + _first_exceeding(tl.cumsum(chosen.to(tl.float64), 0), chosen, target, lane, INNER)


@triton.jit
def _first_exceeding(upto, weight, target, index, COUNT: tl.constexpr):
    """The first index of positive weight with a cumulative sum above the target; the last one if rounding leaves none."""
    first = tl.min(tl.where((upto > target) & (weight > 0), index, COUNT), 0)
    return tl.where(first < COUNT, first, tl.max(tl.where(weight > 0, index, 0), 0))


# -- probabilities and samples -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def _filter(
    logits_ptr,  # [rows, V]
    probs_ptr,  # float32 [rows, V]
    temperature_ptr,  # float32 [rows / T]
    k_ptr,  # int64 [rows / T]
    p_ptr,  # float64 [rows / T]
    min_p_ptr,  # float64 [rows / T]; not read without MIN_P
    T,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERS: tl.constexpr,
    MIN_P: tl.constexpr,
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
        if MIN_P:  # the largest weight is 1
            weight = tl.where(weight >= tl.load(min_p_ptr + row // T).to(tl.float32), weight, 0.0)

    total = tl.sum(weight, 0)
    total = tl.where(total > 0, total, 1.0)
    tl.store(probs_ptr + begin + lane, weight / total, mask=inside)


@triton.jit(do_not_specialize=["T"])
def _gumbel_max(
    probs_ptr,  # float32 [rows, V]
    seeds_ptr,  # int64 [rows / T]
    position_ptr,  # int64 [rows]
    token_ptr,  # int64 [rows]
    T,
    V: tl.constexpr,
):
    row = tl.program_id(0)
    key = make_noise_key(tl.load(seeds_ptr + row // T), tl.load(position_ptr + row), TOKEN)
    best, token = -1.0, 0
    for first in range(0, V, _PIECE):
        lane = first + tl.arange(0, _PIECE)
        probs = tl.load(probs_ptr + row.to(tl.int64) * V + lane, mask=lane < V, other=-1.0)
        ratio = tl.where(probs == probs, probs, 0.0) / exponential_from_key(key, lane)
        ratio = tl.where(lane < V, ratio, -1.0)
        token = tl.where(tl.max(ratio, 0) > best, first + tl.argmax(ratio, 0), token)
        best = tl.maximum(best, tl.max(ratio, 0))
    tl.store(token_ptr + row, token)


def row_options(V: int) -> dict[str, int]:
    """Constants and options of a kernel whose programs hold rows of V numbers: the fewest warps without register spills."""
    return {"V": V, "BLOCK": triton.next_power_of_2(V), "num_warps": 8 if V <= 8192 else 16, "enable_fp_fusion": False}


def probs_from_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None, filters: bool
) -> Tensor:
    """Return the probabilities, float32 `[B, T, V]`, of logits `[B, T, V]` of any float dtype.

    Args:
        temperature, top_k, top_p, min_p: float32, int64, float64 and float64, B values each: above 0; from 1 to V; above 0,
            where 1 and more keeps all tokens but those of rounded sums, and 2 all; from 0 to 1, or None: no image has it.
        filters: whether any image has a filter; otherwise only `temperature` is read.
    """
    B, T, V = logits.shape
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if B * T:
        options = temperature, top_k, top_p, temperature if min_p is None else min_p, T
        kind = {"FILTERS": filters, "MIN_P": min_p is not None}
        launch(_filter, (B * T,), logits.contiguous(), probs, *options, **kind, **row_options(V))
    return probs


def sample_gumbel_max(probs: Tensor, seeds: Tensor, position: Tensor) -> Tensor:
    """Sample tokens int64 `[B, T]` from float32 weights `[B, T, V]`; see `vargen.kernels.ops.sample_gumbel_max`."""
    tokens = torch.empty(probs.shape[:-1], dtype=torch.int64, device=probs.device)
    if tokens.numel():
        given = *(each.contiguous() for each in (probs, seeds, position)), tokens, position.shape[-1]
        launch(_gumbel_max, (tokens.numel(),), *given, V=probs.shape[-1], num_warps=8, enable_fp_fusion=False)
    return tokens

"""Selection among the values of one row inside a kernel without sorting: thresholds by bisection, sampling by one uniform.

float32 values are ordered like the integers of their bits, if the bits of negative values are inverted. So at most 32
bisection steps over these integers find the k-th largest value exactly. All kernels treat ties in the same way: values equal to
a threshold are selected.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ALL = tl.constexpr(0x7FFFFFFF)
PADDING_KEY = tl.constexpr(-0x80000000)  # below the key of every number, -inf included


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

"""Choosing among the values of one row inside a kernel, without sorting: thresholds by bisection, a draw by one coin.

A float32 is ordered like the integer of its bits once those of negative values are turned round; so the exact k-th largest
value is found by halving the range of that integer at most 32 times, and with it what every kernel here does with ties:
whatever equals a threshold is on its side.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ALL = tl.constexpr(0x7FFFFFFF)
OUTSIDE = tl.constexpr(-0x80000000)  # below the key of every number, -inf included


@triton.jit
def ordered_key(x, inside):
    """int32 keys that are ordered as float32 `x`, which holds no NaN; equal values, 0 and -0 too, have equal keys."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(inside, bits ^ ((bits >> 31) & _ALL), OUTSIDE)


@triton.jit
def kth_key(key, k):
    """The k-th largest key, of at least k inside: the largest t that at least k keys reach."""
    low = tl.min(tl.where(key == OUTSIDE, _ALL, key), 0).to(tl.int64)
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
def mass_key(key, weight, least, target):
    """The largest key t above `least` whose keys t and up weigh more than `target`; `least` if there is none."""
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
def drawn_by_coin(weight, lane, coin, BLOCK: tl.constexpr):
    """A lane with probability weight / sum(weight), by a coin in (0, 1); never one of weight 0, and 0 if all are."""
    upto = tl.cumsum(weight.to(tl.float64), 0)
    passed = (upto > coin * tl.max(upto, 0)) & (weight > 0)
    first = tl.min(tl.where(passed, lane, BLOCK), 0)
    last = tl.max(tl.where(weight > 0, lane, 0), 0)  # where rounding leaves none
    return tl.where(first < BLOCK, first, last)

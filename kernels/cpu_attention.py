"""Attention of a CPU pass, for Numba: bit for bit `vargen.kernels.int8.attend_int8`, over a cache of pairs of 16-bit integers.

Keys are stored as `[R, G, K/2, S, 2]` and values as `[R, G, S/2, K', 2]` (K' is K rounded up to 16), so that an instruction
multiplies two numbers of 16 slots, or of 16 columns, at once. Slots are [ prefix | image tokens | scratch ].

Shape suffixes: R rows, T tokens of the pass, H query heads, G key heads, K head width, S slots, P prefix slots.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from vargen.kernels.cpu_steps import INNER, ROUND, SMALLEST, ZERO, exp, f32, f64, i32, i64
from vargen.kernels.cpu_vector import (
    pair_dot_1x1,
    pair_dot_1x2,
    pair_dot_1x4,
    pair_dot_4x1,
    pair_dot_4x2,
    pair_dot_4x4,
)
from vargen.kernels.int8_format import EXP_UNITS, WEIGHT_SUM

QUERIES = 4  # queries of a block: 16 vectors of sums fit the registers
_UNITS, _SUM, _SUM_UNIT = f32(EXP_UNITS), WEIGHT_SUM, f32(1 / WEIGHT_SUM)
_HIDDEN = f32(-np.inf)


@njit(**INNER)
def quantize_head(row, limit, out, step):  # type: ignore[no-untyped-def]
    """Quantize float32 `row` to 16-bit integers at every `step`-th place of `out`; returns the largest absolute value."""
    top = SMALLEST
    for j in range(len(row)):
        top = max(top, abs(row[j]))
    factor = limit / top
    for j in range(len(row)):
        out[j * step] = np.int16((row[j] * factor + ROUND) - ROUND)
    return top


@njit(**INNER)
def rotate(row, cos_sin):  # type: ignore[no-untyped-def]
    """Rotate interleaved pairs of float32 `[K]` in place by `[K/2, 2]`."""
    for j in range(len(cos_sin)):
        even, odd, cos, sin = row[2 * j], row[2 * j + 1], cos_sin[j, 0], cos_sin[j, 1]
        row[2 * j] = even * cos - odd * sin
        row[2 * j + 1] = even * sin + odd * cos


@njit(**INNER)
def store_value(row, limit, v, slot):  # type: ignore[no-untyped-def]
    """Quantize a value `row [K]` to a slot of `v [S/2, K', 2]`; returns its scale."""
    return quantize_head(row, f32(limit), v[slot >> 1].reshape(-1)[slot & 1 :], 2) * f32(1 / limit)


@njit(**INNER)
def write_tokens(sums, stride, scale, channel_scale, cos_sin, length, prefix, limits, k, v, k_scale, v_scale, q, q_scale, row):  # type: ignore[no-untyped-def]
    """Rotate and quantize the queries, keys and values of a pass; write keys and values to the slots after each row's pointer.

    Args:
        sums: int32 product with `stride` columns a row: queries, keys, values.
        cos_sin: float32 `[R, T, K/2, 2]`.
        length: int64 `[R]`, pointer of each row, at most the number of image tokens.
        limits: largest integers of keys and of values.
        q, q_scale: written: int16 `[R, G, H/G T + 3, K]`, and float32 scales of scores `[R, G, H/G T]`.
        row: float32 `[K]`, scratch.
    """
    R, T = cos_sin.shape[:2]
    G, K = k.shape[1], len(row)
    group = (q.shape[2] - (QUERIES - 1)) // T
    H = G * group
    score_limit, value_limit = limits
    root = f32(K**-0.5)
    for r in range(R):
        for t in range(T):
            m, slot = r * T + t, prefix + length[r] + t
            a = scale[m]
            for h in range(H + 2 * G):
                first = m * stride + h * K
                line, channels = sums[first : first + K], channel_scale[h * K : h * K + K]
                for j in range(K):
                    row[j] = f32(line[j]) * a * channels[j]
                if h < H + G:
                    rotate(row, cos_sin[r, t])
                if h < H:
                    g, number = h // group, (h % group) * T + t
                    top = quantize_head(row, f32(score_limit), q[r, g, number], 1)
                    q_scale[r, g, number] = top * f32(1 / score_limit) * root
                elif h < H + G:
                    g = h - H
                    top = SMALLEST
                    for j in range(K):
                        top = max(top, abs(row[j]))
                    factor = f32(score_limit) / top
                    for j in range(K):
                        k[r, g, j >> 1, slot, j & 1] = np.int16((row[j] * factor + ROUND) - ROUND)
                    k_scale[r, g, slot] = top * f32(1 / score_limit)
                else:
                    g = h - H - G
                    v_scale[r, g, slot] = store_value(row, value_limit, v[r, g], slot)


@njit(**INNER)
def pair_dots(rows, row, row_stride, column, column_stride, steps, vectors, out, out_stride):  # type: ignore[no-untyped-def]
    """Dot products of one or four rows of pairs with 16 x `vectors` columns; addresses as in `cpu_vector.make_dot`."""
    at = 0
    while at < vectors:
        source, target, left = column + 64 * at, out + 64 * at, vectors - at
        if rows == 1:
            if left >= 4:
                pair_dot_1x4(row, row_stride, source, column_stride, steps, 0, target, out_stride)
                at += 4
            elif left >= 2:
                pair_dot_1x2(row, row_stride, source, column_stride, steps, 0, target, out_stride)
                at += 2
            else:
                pair_dot_1x1(row, row_stride, source, column_stride, steps, 0, target, out_stride)
                at += 1
        elif left >= 4:
            pair_dot_4x4(row, row_stride, source, column_stride, steps, 0, target, out_stride)
            at += 4
        elif left >= 2:
            pair_dot_4x2(row, row_stride, source, column_stride, steps, 0, target, out_stride)
            at += 2
        else:
            pair_dot_4x1(row, row_stride, source, column_stride, steps, 0, target, out_stride)
            at += 1


@njit(**INNER)
def weigh_slots(dots, scale, k_scale, v_scale, bias, visible, first, count, row, weights):  # type: ignore[no-untyped-def]
    """Softmax of one query over `count` slots, as integer weights of the quantized values.

    Args:
        dots: int32 `[count]`, products of the integers.
        bias: float32 `[P]`, added to the first P scores.
        visible: bool `[T']`, of slots from `first` on; empty if all are visible.
        row: float32 scratch.
        weights: int16, written; zero from `count` to the next multiple of 16.

    Returns:
        The scale of the weighted sum.
    """
    top, value_top = _HIDDEN, SMALLEST
    for i in range(count):
        row[i] = f32(dots[i]) * scale * k_scale[i]
    for i in range(len(bias)):
        row[i] += bias[i]
    for i in range(len(visible)):
        if not visible[i]:
            row[first + i] = _HIDDEN
    for i in range(count):
        top = max(top, row[i])
        value_top = max(value_top, v_scale[i] if row[i] > _HIDDEN else ZERO)
    total = i64(0)
    for i in range(count):
        term = (exp(row[i] - top) * _UNITS + ROUND) - ROUND
        total += i64(i32(term))
        row[i] = term * v_scale[i]
    unit = f32(_SUM / (f64(total) * f64(value_top)))
    for i in range(count):
        weights[i] = np.int16((row[i] * unit + ROUND) - ROUND)
    for i in range(count, -(-count // 16) * 16):
        weights[i] = 0
    return value_top * _SUM_UNIT


@njit(**INNER)
def attend_slots(q, q_scale, k, v, k_scale, v_scale, bias, length, prefix, T, ancestors, dots, row, weights, sums, out):  # type: ignore[no-untyped-def]
    """Attention of a pass over the cache, float32 `out [R T, H K]`.

    Args:
        q, q_scale: see `write_tokens`.
        ancestors: bool `[R, T, T]`, which tokens of the pass each token attends to; `[R, 0, 0]` for a chain.
        dots, row, weights, sums: scratch: int32 `[4, S]`, float32 `[S]`, int16 `[4, S]`, int32 `[4, K']`.
    """
    R, G, _, S = k.shape[:4]
    K = 2 * k.shape[2]
    count = q.shape[2] - (QUERIES - 1)
    group, columns = count // T, v.shape[3]
    for r in range(R):
        first = prefix + length[r]
        end = first + T
        for g in range(G):
            number = 0
            while number < count:
                block = QUERIES if count - number >= QUERIES - 1 else 1
                pair_dots(
                    block, q[r, g, number].ctypes.data, 2 * K, k[r, g].ctypes.data, 4 * S, K // 2, -(-end // 16),
                    dots.ctypes.data, 4 * S,
                )  # fmt: skip
                for w in range(min(block, count - number)):
                    t = (number + w) % T
                    seen = end if ancestors.shape[1] else first + t + 1
                    visible = ancestors[r, t] if ancestors.shape[1] else ancestors[r].reshape(-1)[:0]
                    scale = weigh_slots(
                        dots[w], q_scale[r, g, number + w], k_scale[r, g], v_scale[r, g], bias[r], visible, first, seen, row,
                        weights[w],
                    )  # fmt: skip
                    for i in range(-(-seen // 16) * 16, -(-end // 16) * 16):
                        weights[w, i] = 0
                    row[S + w] = scale
                pair_dots(
                    block, weights.ctypes.data, 2 * S, v[r, g].ctypes.data, 4 * columns, -(-end // 2), columns // 16,
                    sums.ctypes.data, 4 * columns,
                )  # fmt: skip
                for w in range(min(block, count - number)):
                    t, h = (number + w) % T, g * group + (number + w) // T
                    scale = row[S + w]
                    for j in range(K):
                        out[r * T + t, h * K + j] = f32(sums[w, j]) * scale
                number += block

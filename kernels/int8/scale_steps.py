"""Steps between the products of a compiled pass of a next-scale transformer, for Numba: adaptive layer norms, GELU, new keys.

Each row is computed by the same loop, whatever is beside it, and sums are of integers, as in `vargen.kernels.int8.steps`.

Shape suffixes: M rows of a product, T tokens of an image's row, D width, F hidden width, H heads, K head width, S slots.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from vargen.kernels.int8.attention import join_pair
from vargen.kernels.int8.format import NORM_MAX
from vargen.kernels.int8.steps import INNER, ONE, ROUND, exp, f32, f64, i32, i64, largest, quantize

_NORM, _NORM_UNIT = f32(NORM_MAX), 1 / NORM_MAX
_CUBIC, _SLOPE = f32(0.044715), f32(-2 * math.sqrt(2 / math.pi))
_EPS = 1e-6  # of layer norms


@njit(**INNER)
def modulate(x, factor, shift, out):
    """Layer norm of float32 `x [D]` without weights, times `factor`, plus `shift`; mean and variance are of 16-bit values."""
    D = len(x)
    top = largest(x, i64(0), D)
    scale = _NORM / top
    total, squares = i64(0), i64(0)
    for d in range(D):
        value = i32((x[d] * scale + ROUND) - ROUND)
        total += i64(value)
        squares += i64(i32(value * value))
    unit = f64(top) * _NORM_UNIT
    mean = f64(total) * unit / D
    center, slope = f32(mean), f32(1.0 / np.sqrt(f64(squares) * unit * unit / D - mean * mean + _EPS))
    for d in range(D):
        out[d] = (x[d] - center) * slope * factor[d] + shift[d]


@njit(**INNER)
def modulate_rows(x, factor, shift, T, row, out, scale):
    """Modulate and quantize rows `x [R T, D]` with `factor` and `shift [R, D]`; `row` is scratch."""
    for m in range(len(x)):
        modulate(x[m], factor[m // T], shift[m // T], row)
        scale[m] = quantize(row, x.shape[1], out[m])


@njit(**INNER)
def add_gained(x, sums, stride, scale, channel_scale, bias, gain, T):
    """Add a product, times `gain [R, D]`, to the residual `x [R T, D]`."""
    for m in range(len(x)):
        a, line, gains = scale[m], sums[m * stride : m * stride + x.shape[1]], gain[m // T]
        for d in range(x.shape[1]):
            x[m, d] += (f32(line[d]) * a * channel_scale[d] + bias[d]) * gains[d]


@njit(**INNER)
def gelu_rows(sums, stride, scale, channel_scale, bias, rows, F, row, out):
    """GELU in its tanh form of a product `[M, F]`, and quantize it; replaces the scales of the rows."""
    for m in range(rows):
        a, line = scale[m], sums[m * stride : m * stride + F]
        for f in range(F):
            x = f32(line[f]) * a * channel_scale[f] + bias[f]
            row[f] = x / (exp((x * x * x * _CUBIC + x) * _SLOPE) + ONE)
        scale[m] = quantize(row, F, out[m])


@njit(**INNER)
def write_scale_tokens(
    sums, stride, scale, channel_scale, bias, sharpness, unit, place, limits, k, v, k_scale, v_scale, q, q_scale, row, m, T
):  # fmt: skip
    """Quantize queries, keys and values of T tokens, from row `m` of the product; write keys and values from `place` on.

    Args:
        sums: int32 product with `stride` columns a row: queries, keys, values.
        sharpness: float32 `[H]`, factors of the scores.
        unit: whether queries and keys are normalized, which their integers then are exactly.
        limits: largest integers of keys and of values.
        k, v, k_scale, v_scale: slots of one layer and row, see `cpu_attention`, without their first axis.
        q, q_scale: written: int16 `[1, H, T + 3, K]`, and float32 scales of scores `[1, H, T]`.
        row: float32 `[3 H K]`, scratch.
    """
    H, K = k.shape[0], 2 * k.shape[1]
    score_limit, value_limit = f32(limits[0]), f32(limits[1])
    score_unit, value_unit = f32(1 / limits[0]), f32(1 / limits[1])
    for t in range(T):
        a, line, slot = scale[m + t], (m + t) * stride, place + t
        for j in range(3 * H * K):
            row[j] = f32(sums[line + j]) * a * channel_scale[j] + bias[j]
        for h in range(3 * H):
            first = h * K
            top = largest(row, first, K)
            factor = (score_limit if h < 2 * H else value_limit) / top
            for j in range(first, first + K):
                row[j] = (row[j] * factor + ROUND) - ROUND
            size = top * score_unit
            if unit:
                squares = i32(0)
                for j in range(first, first + K):
                    squares = i32(squares + i32(i32(row[j]) * i32(row[j])))
                size = f32(1.0 / np.sqrt(f64(squares if squares > 0 else i32(1))))
            if h < H:
                for j in range(K):
                    q[0, h, t, j] = np.int16(row[first + j])
                q_scale[0, h, t] = size * sharpness[h]
            elif h < 2 * H:
                for j in range(K // 2):
                    k[h - H, j, slot] = join_pair(i32(row[first + 2 * j]), i32(row[first + 2 * j + 1]))
                k_scale[h - H, slot] = size
            else:
                for j in range(K):
                    old, new = v[h - 2 * H, slot >> 1, j], i32(row[first + j])
                    v[h - 2 * H, slot >> 1, j] = join_pair(old, new) if slot & 1 else join_pair(new, i32(old >> i32(16)))
                v_scale[h - 2 * H, slot] = top * value_unit

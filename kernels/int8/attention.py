"""Attention of a CPU pass, for Numba: bit for bit that of `vargen.kernels.int8.arithmetic`.

The cache: `vargen.kernels.int8.format.Slots`.

Shape suffixes: R rows, T tokens of the pass, H query heads, G key heads, K head width, S slots, P prefix slots.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from vargen.kernels.int8.format import EXP_UNITS, QUERIES, WEIGHT_SUM
from vargen.kernels.int8.steps import (
    INNER,
    ROUND,
    SMALLEST,
    exp,
    f32,
    f64,
    i32,
    i64,
    largest,
    norm,
)
from vargen.kernels.int8.vector import LANES, WIDTH, bits_of_float, float_of_bits, make_dot

_UNITS, _SUM, _SUM_UNIT = f32(EXP_UNITS), WEIGHT_SUM, f32(1 / WEIGHT_SUM)
_HIDDEN = f32(-np.inf)


@njit(**INNER)
def _join_pair(low, high):
    """The int32 with these 16-bit integers."""
    return i32((high << i32(16)) | (low & i32(0xFFFF)))


@njit(**INNER)
def put_value(v, slot, j, number):
    """Write number `j` of a slot of a head, beside that of the slot with which it shares an int32."""
    old = v[slot >> 1, j]
    v[slot >> 1, j] = _join_pair(old, number) if slot & 1 else _join_pair(number, i32(old >> i32(16)))


@njit(**INNER)
def write_tokens(
    slots, layer, r, first, buffers, stride, channel_scale, biases, inner, eps, rotary, cells, sharpness, unit, T, H
):  # fmt: skip
    """Quantize the queries, keys and values of row r of a pass; write keys and values to the slots from `first` on.

    Args:
        stride: columns of the product of all tokens, `buffers.sums`: queries, keys, values.
        biases: float32 `[L, >= columns]`, of which those of `layer` are added; None: none.
        inner, eps: float32 `[2 L, K]`, RMS norms of the queries and of the keys of each head, before they are rotated, and what
            they add to the variance; `[0, K]` or None: none.
        rotary, cells: float32 `[N, K/2, 2]` and int64 `[R, T]`, factors that rotate queries and keys by the cell of the grid,
            and the cells; None: nothing rotates them.
        sharpness: float32 `[L, H]`, factors of the scores; None: the root of 1/K.
        unit: whether queries and keys are normalized, which their integers then are exactly.
    """
    k, v = slots.k[r, layer], slots.v[r, layer]
    k_scale, v_scale = slots.k_scale[r, layer], slots.v_scale[r, layer]
    G, K = k.shape[0], 2 * k.shape[1]
    group, limits, row = H // G, slots.limits, buffers.row
    q, q_scale = buffers.q, buffers.q_scale
    sums = buffers.sums[r * T * stride :]
    score_limit, value_limit = f32(limits[0]), f32(limits[1])
    score_unit, value_unit, root = f32(1 / limits[0]), f32(1 / limits[1]), f32(K**-0.5)
    for t in range(T):
        a, line, slot = buffers.scale[r * T + t], sums[t * stride : (t + 1) * stride], first + t
        for j in range((H + 2 * G) * K):
            row[j] = f32(line[j]) * a * channel_scale[j]
            if biases is not None:
                row[j] += biases[layer, j]
        for h in range(H + 2 * G):
            part = row[h * K : (h + 1) * K]  # by consecutive places from 0, loops over which LLVM vectorizes
            if inner is not None and len(inner) and h < H + G:
                norm(part, inner[2 * layer + (h >= H)], None, eps, part)
            if rotary is not None and h < H + G:
                cell = cells[r, t]
                for j in range(K // 2):
                    even, odd = part[2 * j], part[2 * j + 1]
                    cos, sin = rotary[cell, j, 0], rotary[cell, j, 1]
                    part[2 * j] = even * cos - odd * sin
                    part[2 * j + 1] = even * sin + odd * cos
            top = largest(part)
            factor = (score_limit if h < H + G else value_limit) / top
            for j in range(K):
                part[j] = (part[j] * factor + ROUND) - ROUND
            size = top * score_unit
            if unit:
                squares = i32(0)
                for j in range(K):
                    squares = i32(squares + i32(i32(part[j]) * i32(part[j])))
                size = f32(1.0 / np.sqrt(f64(squares if squares > 0 else i32(1))))
            if h < H:
                g, number = h // group, (h % group) * T + t
                for j in range(K):
                    q[g, number, j] = np.int16(part[j])
                q_scale[g, number] = size * (root if sharpness is None else sharpness[layer, h])
            elif h < H + G:
                for j in range(K // 2):
                    k[h - H, j, slot] = _join_pair(i32(part[2 * j]), i32(part[2 * j + 1]))
                k_scale[h - H, slot] = size
            else:
                for j in range(K):
                    put_value(v[h - H - G], slot, j, i32(part[j]))
                v_scale[h - H - G, slot] = top * value_unit


def _make_dots(rows, most):
    """Make a function of the dot products of `rows` rows of pairs with 16 x `vectors` columns, with arguments of `make_dot`.

    Args:
        most: 1, 2 or 4, vectors that fit the registers.
    """
    some = min(most, 2)
    one, two, four = (make_dot(rows, count * LANES // WIDTH, True) for count in (1, some, most))

    @njit(**INNER)
    def dots(row, row_stride, column, column_stride, steps, vectors, out, out_stride):
        at = 0
        while at < vectors:
            source, target, left = column + 64 * at, out + 64 * at, vectors - at
            if left >= most:
                four(row, row_stride, source, column_stride, steps, 0, target, out_stride)
                at += most
            elif left >= some:
                two(row, row_stride, source, column_stride, steps, 0, target, out_stride)
                at += some
            else:
                one(row, row_stride, source, column_stride, steps, 0, target, out_stride)
                at += 1

    return dots


_MOST_1, _MOST_4 = {4: (2, 1), 8: (4, 1), 16: (4, 4)}[WIDTH]
_dots_1, _dots_4 = _make_dots(1, _MOST_1), _make_dots(QUERIES, _MOST_4)


@njit(**INNER)
def pair_dots(rows, row, row_stride, column, column_stride, steps, vectors, out, out_stride):
    """Dot products of one or four rows."""
    if rows == 1:
        _dots_1(row, row_stride, column, column_stride, steps, vectors, out, out_stride)
    else:
        _dots_4(row, row_stride, column, column_stride, steps, vectors, out, out_stride)


@njit(**INNER)
def weigh_slots(dots, w, scale, k_scale, v_scale, bias, ancestors, r, t, first, count, row, weights):
    """Softmax of query `w` of a block over `count` slots, as integer weights of the quantized values.

    Args:
        dots: int32 `[4, S]`, products of the integers.
        scale, k_scale, v_scale: of the query, and float32 `[S]`.
        bias: float32 `[R, P]`, added to the first P scores.
        ancestors: bool `[R, T, T]`, which of the slots from `first` on are visible; None or `[R, 0, 0]`: all.
        row: float32 scratch.
        weights: int16 `[4, S]`, written up to the next multiple of 16, with zeros from `count` on.

    Returns:
        The scale of the weighted sum.
    """
    end = -(-count // 16) * 16  # loops over whole vectors
    for i in range(end):
        row[i] = f32(dots[w, i]) * scale * k_scale[i]
    for i in range(count, end):
        row[i] = _HIDDEN
    for i in range(bias.shape[1]):
        row[i] += bias[r, i]
    if ancestors is not None:
        for i in range(ancestors.shape[1]):
            if not ancestors[r, t, i]:
                row[first + i] = _HIDDEN
    most, value_most = i32(-(2**31)), bits_of_float(SMALLEST)
    for i in range(end):
        bits = bits_of_float(row[i])
        order = i32(bits ^ ((bits >> i32(31)) & i32(2**31 - 1)))  # integers in the order of the scores
        most = order if order > most else most
        bits = bits_of_float(v_scale[i]) if row[i] > _HIDDEN else i32(0)
        value_most = bits if bits > value_most else value_most
    top = float_of_bits(most ^ ((most >> i32(31)) & i32(2**31 - 1)))
    value_top = float_of_bits(value_most)
    total = i64(0)
    for i in range(end):
        term = (exp(row[i] - top) * _UNITS + ROUND) - ROUND
        total += i64(i32(term))
        row[i] = term * v_scale[i]
    unit = f32(_SUM / (f64(total) * f64(value_top)))
    for i in range(end):
        weights[w, i] = np.int16((row[i] * unit + ROUND) - ROUND)
    return value_top * _SUM_UNIT


@njit(**INNER)
def attend_slots(slots, layer, r, first, reach, ancestors, buffers, T, H):
    """Attention of row r of a pass, whose tokens are in the slots from `first` on, with the queries of `buffers.q`.

    Args:
        reach: int64 `[R, T]`, number of tokens of the pass that are visible to each token; 0: it sees nothing at all, and gets
            zeros.
        ancestors: bool `[R, T, T]`, which of these it attends to; None or `[R, 0, 0]`: all.
    """
    k, v = slots.k[r, layer], slots.v[r, layer]
    k_scale, v_scale = slots.k_scale[r, layer], slots.v_scale[r, layer]
    q, row = buffers.q, buffers.row
    dots, weights, sums = buffers.dots, buffers.weights, buffers.mixed
    G, S, K, columns = k.shape[0], k.shape[2], 2 * k.shape[1], v.shape[2]
    group = H // G
    count, end = group * T, first + T
    query, key, value = i64(q.ctypes.data), i64(k.ctypes.data), i64(v.ctypes.data)
    products, shares, total = i64(dots.ctypes.data), i64(weights.ctypes.data), i64(sums.ctypes.data)
    vectors = -(-end // 16)
    for g in range(G):
        number = 0
        while number < count:
            block = QUERIES if count - number >= QUERIES - 1 else 1
            used = block if block <= count - number else count - number
            source, keys = query + 2 * K * (g * q.shape[1] + number), key + 2 * K * S * g
            pair_dots(block, source, 2 * K, keys, 4 * S, K // 2, vectors, products, 4 * S)
            for w in range(used):
                t = (number + w) % T
                seen, scale = first + reach[r, t], buffers.q_scale[g, number + w]
                if reach[r, t] == 0:
                    seen, row[S + w] = i64(0), f32(0)
                else:
                    row[S + w] = weigh_slots(
                        dots, w, scale, k_scale[g], v_scale[g], slots.bias, ancestors, r, t, first, seen, row, weights
                    )  # fmt: skip
                for i in range(-(-seen // 16) * 16, 16 * vectors):
                    weights[w, i] = 0
            values, steps = value + 2 * S * columns * g, -(-end // 2)
            pair_dots(block, shares, 2 * S, values, 4 * columns, steps, columns // 16, total, 4 * columns)
            for w in range(used):
                at, h = (number + w) % T, g * group + (number + w) // T
                for j in range(K):
                    buffers.attended[r * T + at, h * K + j] = f32(sums[w, j]) * row[S + w]
            number += block

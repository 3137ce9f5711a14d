"""A whole pass of a next-scale transformer (`vargen.models.var.network`) on a CPU as one compiled function.

Between its products of 8-bit integers are four steps a layer: modulate and quantize; dequantize, write the cache, attend,
quantize; dequantize, add, modulate, quantize; dequantize, GELU, quantize. Each row is computed by the same loop, whatever is
beside it, and sums are of integers: its result does not depend on the number of tokens and rows of a pass.

Shape suffixes: as in `vargen.kernels.int8.format`; B images (half as many as rows under guidance), T tokens of the pass in
each row, n tokens with logits, H heads, F hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import numpy as np
from numba import njit

from vargen.kernels.int8.attention import attend_slots, write_tokens
from vargen.kernels.int8.format import NORM_MAX, PANEL, Buffers, Layers, Matrix, Slots
from vargen.kernels.int8.steps import (
    INNER,
    ONE,
    ROUND,
    compiled,
    exp,
    f32,
    f64,
    i32,
    i64,
    largest,
    product,
    quantize,
)

_NORM, _NORM_UNIT = f32(NORM_MAX), 1 / NORM_MAX
_CUBIC, _SLOPE = f32(0.044715), f32(-2 * math.sqrt(2 / math.pi))
_EPS = 1e-6  # of layer norms


class Weights(NamedTuple):
    """Weights of the layers and of the output layer; numbers of `sizes` are D, F, and whether queries and keys are normalized.

    The matrices of a layer are those of queries, keys and values; attention output; the two of the feed-forward.
    """

    sizes: Annotated[np.ndarray, "int64 [3]"]
    layers: Layers
    bias: Annotated[np.ndarray, "float32 [L, N]"]  # as `layers.scale`
    sharpness: Annotated[np.ndarray, "float32 [L, H]"]  # factors of the scores
    output: Matrix
    output_bias: Annotated[np.ndarray, "float32 [V']"]


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


@compiled(
    Weights, Slots, Buffers, "float32 [R, T, D]", "float32 [L, 6, R, D]", "float32 [2, R, D]", "int64 [R, T]",
    "bool [1, 0, 0]", int, "float32 [n]", "float32 [R, n, D]", "float32 [B, n, V]",
)  # fmt: skip
def run_pass(
    weights, slots, buffers, states, modulation, last_modulation, reach, ancestors, place, guidance, features, logits
):  # fmt: skip
    """Run all layers over `states [R, T, D]`, and the output layer over the last n tokens of each row.

    Args:
        states: embedded inputs, which become the last residual.
        modulation: `[L, 6, R, D]`: gains of attention and feed-forward, factors, shifts of the norms.
        last_modulation: `[2, R, D]`: factor and shift of the final norm.
        reach: `[R, T]`, number of slots from `place` on that are visible to each token; 0: it sees nothing at all.
        ancestors: `[1, 0, 0]`: no trees.
        place: slot that the first keys and values are written to.
        guidance: `[n]`, strengths g of c + g (c - u), between the first and the last B rows; `[0]` without.
        features: `[R, n, D]`, written; under guidance, the first B rows are guided.
        logits: `[B, n, V]`, written; all R rows without guidance.
    """
    x = states.reshape(states.shape[0] * states.shape[1], states.shape[2])
    _run_layers(weights, slots, buffers, x, modulation, reach, ancestors, place)
    _run_output(x, last_modulation, weights.output, weights.output_bias, buffers, guidance, features, logits)


@njit(**INNER)
def _run_layers(weights, slots, buffers, x, modulation, reach, ancestors, place):
    D, F, unit = weights.sizes
    R, T = reach.shape
    M, H = len(x), slots.k.shape[2]
    scale, sums, row, wide = buffers.scale, buffers.sums, buffers.row, buffers.wide
    columns_of = (3 * D, D, F, D)
    for layer in range(len(weights.layers.packed)):
        first = i64(0)
        for stage in range(4):  # a loop, so that the product is compiled only once
            columns = -(-columns_of[stage] // PANEL) * PANEL
            factors, inputs = (buffers.hidden, F) if stage == 3 else (wide, D)
            if stage & 1 == 0:
                half = stage >> 1
                modulate_rows(x, modulation[layer, 2 + half], modulation[layer, 4 + half], T, row, wide, scale)
            start, channels = weights.layers.start[layer, first:], weights.layers.scale[layer, first:]
            bias = weights.bias[layer, first:]
            product(factors, M, weights.layers.packed[layer, stage], start, -(-inputs // 4), sums, columns)
            first += columns
            if stage == 0:
                for r in range(R):  # each over its own slots of this layer, with the queries of its own tokens
                    own, end, length = r * T, layer + 1, slots.length[r : r + 1]
                    k, k_scale = slots.k[r, layer:end], slots.k_scale[r, layer:end]
                    v, v_scale = slots.v[r, layer:end], slots.v_scale[r, layer:end]
                    write_tokens(
                        sums[own * columns :], columns, scale[own:], channels, bias, None, weights.sharpness[layer], unit,
                        length, place, slots.limits, k, v, k_scale, v_scale, buffers.q, buffers.q_scale, row, T, H,
                    )  # fmt: skip
                    attend_slots(
                        buffers.q, buffers.q_scale, k, v, k_scale, v_scale, slots.bias[r : r + 1], length, place,
                        reach[r : r + 1], ancestors, buffers.dots, row, buffers.weights, buffers.mixed,
                        buffers.attended[own:], T, H,
                    )  # fmt: skip
                for m in range(M):
                    scale[m] = quantize(buffers.attended[m], D, wide[m])
            elif stage == 2:
                gelu_rows(sums, columns, scale, channels, bias, M, F, row, buffers.hidden)
            else:
                add_gained(x, sums, columns, scale, channels, bias, modulation[layer, stage >> 1], T)


@njit(**INNER)
def _run_output(x, modulation, output, bias, buffers, guidance, features, logits):
    R, n, D = features.shape
    T, B, V, columns = len(x) // R, len(logits), logits.shape[2], len(output.start)
    for r in range(R):
        for t in range(n):
            modulate(x[(r + 1) * T - n + t], modulation[0, r], modulation[1, r], features[r, t])
    for r in range(B):
        for t in range(n):
            if len(guidance):
                for d in range(D):
                    conditional = features[r, t, d]
                    features[r, t, d] = conditional + (conditional - features[B + r, t, d]) * guidance[t]
            buffers.scale[r * n + t] = quantize(features[r, t], D, buffers.wide[r * n + t])
    product(buffers.wide, B * n, i64(output.values.ctypes.data), output.start, -(-D // 4), buffers.sums, columns)
    for r in range(B):
        for t in range(n):
            m = r * n + t
            a, line = buffers.scale[m], buffers.sums[m * columns : m * columns + V]
            for v in range(V):
                logits[r, t, v] = f32(line[v]) * a * output.scale[v] + bias[v]

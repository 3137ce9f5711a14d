"""A whole pass of a Llama-like or a next-scale transformer on a CPU as one compiled function, over buffers allocated once.

Between the products of 8-bit integers, which read each weight once, are four steps a layer: norm (or modulate) and quantize;
dequantize, rotate, write the cache, attend, quantize; dequantize, add, norm, quantize; dequantize, SwiGLU (or GELU), quantize.
Each row is computed by the same loop, whatever is beside it. Token passes return bit for bit what the operators in
`vargen.kernels.int8.arithmetic` do.

Shape suffixes: as in `vargen.kernels.int8.format`; B images (half as many as rows under guidance), T tokens of the pass in
each row, n tokens with logits, H query heads, F hidden width, V vocabulary, A slots of the longest path.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import numpy as np
from numba import njit

from vargen.kernels.int8.attention import attend_slots, put_value, write_tokens
from vargen.kernels.int8.format import PANEL, Buffers, Layers, Matrix, Slots
from vargen.kernels.int8.sharing import help_pass, product  # noqa: F401 - compiled with the passes
from vargen.kernels.int8.steps import (
    INNER,
    ONE,
    add_normalized_rows,
    add_rows,
    compiled,
    exp,
    f32,
    i32,
    i64,
    norm,
    quantize,
    swiglu_rows,
)

_CUBIC, _SLOPE = f32(0.044715), f32(-2 * math.sqrt(2 / math.pi))
_EPS = 1e-6  # of layer norms


@njit(**INNER)
def _run_layers(
    layers, slots, buffers, x, T, H, F, norms, outer, inner, eps, modulation, biases, sharpness, unit, rotary, cells, place,
    most, reach, ancestors,
):  # fmt: skip
    """Run all layers over `x [R T, D]`, which becomes the last residual.

    The matrices of a layer are those of queries, keys and values; attention output; gate and up, or the first one of a GELU's
    feed-forward; down.

    Args:
        norms: float32 `[2 L, D]` or more, of RMS norms; `modulation` None.
        outer: float32 `[2 L, D]`, of RMS norms of what is added to the residual; None or `[0, D]`: none.
        inner: float32 `[2 L, K]`, of RMS norms of queries and keys; None or `[0, K]`: none.
        eps: what norms add to the variance.
        modulation: see `run_scale_pass`; `norms` None.
        biases: float32 as `layers.scale`; None: none.
        sharpness: float32 `[L, H]`; this and the next three: see `write_tokens`.
        place, most: a row's tokens are written from `place` plus its length on, or plus `most`: full rows, only to scratch.
        reach, ancestors: see `attend_slots`.
    """
    G, K = slots.k.shape[2], 2 * slots.k.shape[3]
    M, D = x.shape
    scale, sums, row, wide = buffers.scale, buffers.sums, buffers.row, buffers.wide
    columns_of = ((H + 2 * G) * K, D, 2 * F if modulation is None else F, D)
    for layer in range(len(layers.packed)):
        first = i64(0)
        for stage in range(4):  # a loop, so that the product is compiled only once
            half, columns = stage >> 1, -(-columns_of[stage] // PANEL) * PANEL
            factors, inputs = (buffers.hidden, F) if stage == 3 else (wide, H * K if stage == 1 else D)
            if stage & 1 == 0:
                for m in range(M):
                    if norms is not None:  # Numba leaves out what uses an argument that is None
                        norm(x[m], norms[2 * layer + half], None, eps, row)
                    if modulation is not None:
                        norm(x[m], modulation[layer, 2 + half, m // T], modulation[layer, 4 + half, m // T], eps, row)
                    scale[m] = quantize(row, D, wide[m])
            start, channels = layers.start[layer, first:], layers.scale[layer, first:]
            product(factors, M, layers.packed[layer, stage], start, -(-inputs // 4), buffers.pairs, buffers.team, sums, columns)
            if stage == 0:
                for r in range(len(reach)):
                    slot = place + (slots.length[r] if slots.length[r] < most else most)
                    write_tokens(
                        slots, layer, r, slot, buffers, columns, channels, biases, inner, eps, rotary, cells, sharpness, unit,
                        T, H,
                    )  # fmt: skip
                    attend_slots(slots, layer, r, slot, reach, ancestors, buffers, T, H)
                for m in range(M):
                    scale[m] = quantize(buffers.attended[m], H * K, wide[m])
            if norms is not None:
                if stage == 2:
                    swiglu_rows(sums, columns, scale, channels, M, F, row, buffers.hidden)
                elif stage:
                    if outer is None:
                        add_rows(x, sums, columns, scale, channels, None, None, T)
                    else:
                        add_normalized_rows(x, sums, columns, scale, channels, outer, 2 * layer + half, eps, row)
            if modulation is not None:
                bias = biases[layer, first:]
                if stage == 2:
                    gelu_rows(sums, columns, scale, channels, bias, M, F, row, buffers.hidden)
                elif stage:
                    add_rows(x, sums, columns, scale, channels, bias, modulation[layer, half], T)
            first += columns


@njit(**INNER)
def _write_logits(output, bias, buffers, D, logits):
    """Run the output layer over the quantized rows, to `logits [rows, tokens, V]`."""
    R, T, V = logits.shape
    columns = len(output.start)
    matrix, steps = i64(output.values.ctypes.data), -(-D // 4)
    product(buffers.wide, R * T, matrix, output.start, steps, buffers.pairs, buffers.team, buffers.sums, columns)
    for r in range(R):
        for t in range(T):
            m = r * T + t
            a, line = buffers.scale[m], buffers.sums[m * columns : m * columns + V]
            for v in range(V):
                logits[r, t, v] = f32(line[v]) * a * output.scale[v]
                if bias is not None:
                    logits[r, t, v] += bias[v]


# -- next-token transformers --------------------------------------------------------------------------------------------------


class TokenWeights(NamedTuple):
    """Weights of the layers that a pass runs, and of the output layer; numbers of `sizes` are H, F."""

    sizes: Annotated[np.ndarray, "int64 [2]"]
    layers: Layers
    norms: Annotated[np.ndarray, "float32 [2 L + 1, D]"]
    output: Matrix
    embedding: Annotated[np.ndarray, "float32 [V, D]"]
    rotary: Annotated[np.ndarray, "float32 [tokens, K/2, 2]"]
    eps: float


@compiled(
    TokenWeights, Slots, Buffers, "int64 [B, T]", "int64 [R, T]", "bool [R, T, T]", "float32 [B, T]",
    "float32 [R, T, D]", "float32 [R, T, D]", "float32 [B, T, V]",
)  # fmt: skip
def run_token_pass(weights, slots, buffers, tokens, positions, ancestors, guidance, states, features, logits):
    """Run all layers and the output layer over tokens `[B, T]`, after the pointer of each row.

    Writes the cache, but does not move its pointers.

    Args:
        positions: grid cells, which are clamped to the last one; `[0, 0]`: consecutive from the pointer.
        ancestors: which tokens of the pass each token attends to; `[R, 0, 0]` for a chain.
        guidance: scales of classifier-free guidance between the first and the last B rows, 1 for the first alone; `[0, 0]`
            without.
        states, features: written: residuals before and after the final norm.
        logits: written; all R rows without guidance.
    """
    R, T, D = states.shape
    x, row = states.reshape(R * T, D), buffers.row
    reach, cells = buffers.places[0], buffers.places[1]
    last = len(weights.rotary) - 1
    for r in range(R):
        for t in range(T):
            reach[r, t] = T if ancestors.shape[1] else t + 1
            cell = positions[r, t] if len(positions) else slots.length[r] + t
            cells[r, t] = cell if cell < last else last
            for d in range(D):
                x[r * T + t, d] = weights.embedding[tokens[r % len(tokens), t], d]
    _run_layers(
        weights.layers, slots, buffers, x, T, weights.sizes[0], weights.sizes[1], weights.norms, None, None, weights.eps, None,
        None, None, False, weights.rotary, cells, slots.bias.shape[1], last + 1, reach, ancestors,
    )  # fmt: skip
    for r in range(R):
        for t in range(T):
            norm(x[r * T + t], weights.norms[-1], None, weights.eps, features[r, t])
    for r in range(len(logits)):
        for t in range(T):
            for d in range(D):
                row[d] = features[r, t, d]
                if len(guidance) and guidance[r, t] != ONE:
                    unconditional = features[len(guidance) + r, t, d]
                    row[d] = (row[d] - unconditional) * guidance[r, t] + unconditional
            buffers.scale[r * T + t] = quantize(row, D, buffers.wide[r * T + t])
    _write_logits(weights.output, None, buffers, D, logits)


@compiled(Slots, "int64 [R, A]", "int64 [R]", int)
def move_slots(slots, path, count, tokens):
    """Move the accepted tokens of the last pass to consecutive slots after each row's pointer, which does not move.

    Args:
        path: int64 `[R, A]`, indices among the pass's tokens, strictly increasing up to `count [R]`.
        tokens: number of image tokens; rows that have all are left as they are.
    """
    R, L, G, pairs = slots.k.shape[:4]
    for r in range(R):
        first = slots.bias.shape[1] + min(slots.length[r], tokens)
        for step in range(count[r]):
            source, target = first + path[r, step], first + step
            if source == target:
                continue
            for layer in range(L):
                for g in range(G):
                    k, v = slots.k[r, layer, g], slots.v[r, layer, g]
                    for pair in range(pairs):
                        k[pair, target] = k[pair, source]
                    for j in range(v.shape[1]):
                        put_value(v, target, j, i32(v[source >> 1, j] >> i32(16 * (source & 1))))
                    slots.k_scale[r, layer, g, target] = slots.k_scale[r, layer, g, source]
                    slots.v_scale[r, layer, g, target] = slots.v_scale[r, layer, g, source]


# -- language models ----------------------------------------------------------------------------------------------------------


class LanguageWeights(NamedTuple):
    """Weights of the layers of a language model; numbers of `sizes` are H, F."""

    sizes: Annotated[np.ndarray, "int64 [2]"]
    layers: Layers
    bias: Annotated[np.ndarray, "float32 [L, N]"]  # of queries, keys and values; as `layers.scale`
    norms: Annotated[np.ndarray, "float32 [2 L + 1, D]"]
    outer: Annotated[np.ndarray, "float32 [2 L, D]"]  # norms of what layers add, or [0, D]
    inner: Annotated[np.ndarray, "float32 [2 L, K]"]  # norms of queries and keys, or [0, K]
    eps: float


@compiled(
    LanguageWeights, Slots, Buffers, "float32 [R, T, D]", "float32 [R T, K/2, 2]", "int64 [R, T]", "bool [R, T, T]", int, int,
    "float32 [R, T, D]",
)  # fmt: skip
def run_language_pass(weights, slots, buffers, states, rotary, reach, ancestors, place, most, features):
    """Run all layers over embedded tokens `states [R, T, D]`, which become the last residual.

    Writes the cache, but does not move its pointers.

    Args:
        rotary: factors of each token.
        reach: number of tokens of the pass that are visible to each; 0: it sees nothing at all, as padding.
        ancestors: which tokens of the pass each token attends to; `[R, 0, 0]` for a chain.
        place, most: see `_run_layers`.
        features: written: residuals after the final norm.
    """
    R, T, D = states.shape
    x, cells = states.reshape(R * T, D), buffers.places[1]
    for r in range(R):
        for t in range(T):
            cells[r, t] = r * T + t
    _run_layers(
        weights.layers, slots, buffers, x, T, weights.sizes[0], weights.sizes[1], weights.norms, weights.outer, weights.inner,
        weights.eps, None, weights.bias, None, False, rotary, cells, place, most, reach, ancestors,
    )  # fmt: skip
    for r in range(R):
        for t in range(T):
            norm(x[r * T + t], weights.norms[-1], None, weights.eps, features[r, t])


@compiled(
    Matrix,
    "float32 [N]",
    "float32 [M, C]",
    "uint8 [M, C']",
    "float32 [M]",
    "int16 [M, C']",
    "int64 [S]",
    "int32 [M N']",
    "float32 [M, N]",
)
def run_linear(matrix, bias, x, wide, scale, pairs, team, sums, out):
    """Quantize rows `x [M, C]`, multiply them with a matrix, and add a bias.

    The arrays between `x` and `out` are overwritten; see `vargen.kernels.int8.format.Buffers`.
    """
    columns, address = len(matrix.start), i64(matrix.values.ctypes.data)
    for m in range(len(x)):
        scale[m] = quantize(x[m], x.shape[1], wide[m])
    product(wide, len(x), address, matrix.start, -(-x.shape[1] // 4), pairs, team, sums, columns)
    for m in range(len(x)):
        a, line = scale[m], sums[m * columns : m * columns + out.shape[1]]
        for n in range(out.shape[1]):
            out[m, n] = f32(line[n]) * a * matrix.scale[n] + bias[n]


# -- next-scale transformers --------------------------------------------------------------------------------------------------


class ScaleWeights(NamedTuple):
    """Weights of the layers and of the output layer; numbers of `sizes` are F, and whether queries and keys are normalized."""

    sizes: Annotated[np.ndarray, "int64 [2]"]
    layers: Layers
    bias: Annotated[np.ndarray, "float32 [L, N]"]  # as `layers.scale`
    sharpness: Annotated[np.ndarray, "float32 [L, H]"]  # factors of the scores
    output: Matrix
    output_bias: Annotated[np.ndarray, "float32 [V']"]


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
    ScaleWeights, Slots, Buffers, "float32 [R, T, D]", "float32 [L, 6, R, D]", "float32 [2, R, D]", "int64 [R, T]",
    int, "float32 [n]", "float32 [R, n, D]", "float32 [B, n, V]",
)  # fmt: skip
def run_scale_pass(weights, slots, buffers, states, modulation, last_modulation, reach, place, guidance, features, logits):
    """Run all layers over `states [R, T, D]`, and the output layer over the last n tokens of each row.

    Args:
        states: embedded inputs, which become the last residual.
        modulation: gains of attention and feed-forward, factors, shifts of the norms.
        last_modulation: factor and shift of the final norm.
        reach: number of slots from `place` on that are visible to each token; 0: it sees nothing at all.
        place: slot that the first keys and values are written to.
        guidance: strengths g of c + g (c - u), between the first and the last B rows; `[0]` without.
        features: written; under guidance, the first B rows are guided.
        logits: written; all R rows without guidance.
    """
    R, T, D = states.shape
    n, x = features.shape[1], states.reshape(R * T, D)
    _run_layers(
        weights.layers, slots, buffers, x, T, slots.k.shape[2], weights.sizes[0], None, None, None, _EPS, modulation,
        weights.bias, weights.sharpness, weights.sizes[1], None, None, place, 0, reach, None,
    )  # fmt: skip
    for r in range(R):
        for t in range(n):
            norm(x[(r + 1) * T - n + t], last_modulation[0, r], last_modulation[1, r], _EPS, features[r, t])
    for r in range(len(logits)):
        for t in range(n):
            if len(guidance):
                for d in range(D):
                    conditional = features[r, t, d]
                    features[r, t, d] = conditional + (conditional - features[len(logits) + r, t, d]) * guidance[t]
            buffers.scale[r * n + t] = quantize(features[r, t], D, buffers.wide[r * n + t])
    _write_logits(weights.output, weights.output_bias, buffers, D, logits)

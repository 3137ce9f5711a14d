"""A whole decoding pass of a Llama-like transformer on a CPU as one compiled function, over buffers allocated once.

Between its products of 8-bit integers, which read each weight once, are four steps a layer: norm and quantize; dequantize,
rotate, write the cache, attend, quantize; dequantize, add, norm, quantize; dequantize, SwiGLU, quantize. The result is bit for
bit that of the operators in `vargen.kernels.int8.arithmetic`, for any number of tokens and rows.

Shape suffixes: as in `vargen.kernels.int8.format`; B images (half as many as rows under guidance), T tokens of the pass, H
query heads, F hidden width, V vocabulary, A slots of the longest path.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numba import njit

from vargen.kernels.int8.attention import attend_slots, join_pair, write_tokens
from vargen.kernels.int8.format import PANEL, Buffers, Layers, Matrix, Slots, make_buffers
from vargen.kernels.int8.steps import (
    INNER,
    add_rows,
    compiled,
    f32,
    i32,
    i64,
    norm,
    norm_rows,
    product,
    quantize,
    swiglu_rows,
)


class Weights(NamedTuple):
    """Weights of the layers that a pass runs, and of the output layer; numbers of `sizes` are H, G, K, F.

    The matrices of a layer are those of queries, keys and values; attention output; gate and up; down.
    """

    sizes: Annotated[np.ndarray, "int64 [4]"]
    layers: Layers
    norms: Annotated[np.ndarray, "float32 [2 L + 1, D]"]
    output: Matrix
    embedding: Annotated[np.ndarray, "float32 [V, D]"]
    rotary: Annotated[np.ndarray, "float32 [tokens, K/2, 2]"]
    eps: float


class Places(NamedTuple):
    """Where the tokens of a pass are, written by it."""

    cos_sin: Annotated[np.ndarray, "float32 [R, T, K/2, 2]"]
    length: Annotated[np.ndarray, "int64 [R]"]
    reach: Annotated[np.ndarray, "int64 [R, T]"]


def make_pass_buffers(weights: Weights, slots: Slots, tokens: int) -> tuple[Buffers, Places]:
    """Allocate what passes over up to `tokens` tokens write beside their results."""
    H, G, K, F = (int(size) for size in weights.sizes)
    R, D = slots.k.shape[1], weights.norms.shape[1]
    queries = R, H // G * tokens
    cos_sin, reach = np.zeros((R, tokens, K // 2, 2), np.float32), np.zeros((R, tokens), np.int64)
    buffers = make_buffers(weights.layers, weights.output, slots, R * tokens, queries, max(D, H * K), F)
    return buffers, Places(cos_sin, np.zeros(R, np.int64), reach)


@compiled(
    Weights, Slots, Buffers, Places, "int64 [B, T]", "int64 [R, T]", "bool [R, T, T]", "float32 [B, T]", "float32 [R, T, D]",
    "float32 [R, T, D]", "float32 [B, T, V]",
)  # fmt: skip
def run_pass(weights, slots, buffers, places, tokens, positions, ancestors, guidance, states, features, logits):
    """Run all layers and the output layer over tokens `[B, T]`, after the pointer of each row.

    Writes the cache, but does not move its pointers.

    Args:
        positions: `[R, T]`, grid cells, which are clamped to the last one; `[0, 0]`: consecutive from the pointer.
        ancestors: `[R, T, T]`, which tokens of the pass each token attends to; `[R, 0, 0]` for a chain.
        guidance: `[B, T]`, scales of classifier-free guidance between the first and the last B rows; `[0, 0]` without.
        states, features: `[R, T, D]`, written: residuals before and after the final norm.
        logits: `[B, T, V]`, written; all R rows without guidance.
    """
    x = states.reshape(states.shape[0] * states.shape[1], states.shape[2])
    _run_layers(weights, slots, buffers, places, x, tokens, positions, ancestors)
    _run_output(weights.norms[-1], weights.eps, weights.output, buffers, guidance, x, features, logits)


@njit(**INNER)
def _run_layers(weights, slots, buffers, places, x, tokens, positions, ancestors):
    """Run all layers; `x [M, D]` becomes the last residual."""
    H, G, K, F = weights.sizes
    R, T = slots.k.shape[1], tokens.shape[1]
    M, D = x.shape
    scale, sums, row, wide = buffers.scale, buffers.sums, buffers.row, buffers.wide
    q, q_scale, cos_sin, length = buffers.q, buffers.q_scale, places.cos_sin, places.length
    last = len(weights.rotary) - 1
    for r in range(R):
        length[r] = slots.length[r] if slots.length[r] <= last else last + 1  # full rows write only to scratch
        for t in range(T):
            places.reach[r, t] = T if ancestors.shape[1] else t + 1
            cell = positions[r, t] if len(positions) else length[r] + t
            cell = cell if cell < last else last
            for j in range(K // 2):
                cos_sin[r, t, j, 0], cos_sin[r, t, j, 1] = weights.rotary[cell, j, 0], weights.rotary[cell, j, 1]
            for d in range(D):
                x[r * T + t, d] = weights.embedding[tokens[r % len(tokens), t], d]
    prefix = slots.bias.shape[1]
    columns_of = ((H + 2 * G) * K, D, 2 * F, D)
    for layer in range(len(weights.layers.packed)):
        first = 0
        for stage in range(4):  # a loop, so that the product is compiled only once
            columns = -(-columns_of[stage] // PANEL) * PANEL
            factors, inputs = (buffers.hidden, F) if stage == 3 else (wide, H * K if stage == 1 else D)
            if stage & 1 == 0:
                norm_rows(x, weights.norms[2 * layer + (stage >> 1)], weights.eps, row, wide, scale)
            start, channels = weights.layers.start[layer, first:], weights.layers.scale[layer, first:]
            product(factors, M, weights.layers.packed[layer, stage], start, -(-inputs // 4), sums, columns)
            first += columns
            if stage == 0:
                k, v, k_scale, v_scale = slots.k[layer], slots.v[layer], slots.k_scale[layer], slots.v_scale[layer]
                write_tokens(
                    sums, columns, scale, channels, None, cos_sin, None, False, length, prefix, slots.limits, k, v, k_scale,
                    v_scale, q, q_scale, row, T, H,
                )  # fmt: skip
                attend_slots(
                    q, q_scale, k, v, k_scale, v_scale, slots.bias, length, prefix, places.reach, ancestors,
                    buffers.dots, row, buffers.weights, buffers.mixed, buffers.attended, T, H,
                )  # fmt: skip
                for m in range(M):
                    scale[m] = quantize(buffers.attended[m], H * K, wide[m])
            elif stage == 2:
                swiglu_rows(sums, columns, scale, channels, M, F, row, buffers.hidden)
            else:
                add_rows(x, sums, columns, scale, channels)


@njit(**INNER)
def _run_output(weight, eps, output, buffers, guidance, x, features, logits):
    """Run the final norm, with `weight [D]`, guidance and the output layer over residuals `x [M, D]`."""
    R, T, D = features.shape
    V, columns = logits.shape[2], len(output.start)
    row, scale, wide = buffers.row, buffers.scale, buffers.wide
    for r in range(R):
        for t in range(T):
            norm(x[r * T + t], weight, eps, features[r, t])
    B = len(guidance)
    for r in range(len(logits)):
        for t in range(T):
            m = r * T + t
            if B:
                for d in range(D):
                    row[d] = (features[r, t, d] - features[B + r, t, d]) * guidance[r, t] + features[B + r, t, d]
                scale[m] = quantize(row, D, wide[m])
            else:
                scale[m] = quantize(features[r, t], D, wide[m])
    product(wide, len(logits) * T, i64(output.values.ctypes.data), output.start, -(-D // 4), buffers.sums, columns)
    for r in range(len(logits)):
        for t in range(T):
            m = r * T + t
            a, line = scale[m], buffers.sums[m * columns : m * columns + V]
            for v in range(V):
                logits[r, t, v] = f32(line[v]) * a * output.scale[v]


@compiled("int64 [R]", "int64 [B]")
def advance(length, count):
    """Add `count` int64 `[B]` to the pointers `length` `[R]` of the rows, of which R / B belong to an image."""
    for r in range(len(length)):
        length[r] += count[r % len(count)]


@compiled(Slots, "int64 [R, A]", "int64 [R]", int)
def move_slots(slots, path, count, tokens):
    """Move the accepted tokens of the last pass to consecutive slots after each row's pointer, which does not move.

    Args:
        path: int64 `[R, A]`, indices among the pass's tokens, strictly increasing up to `count [R]`.
        tokens: number of image tokens; rows that have all are left as they are.
    """
    L, R, G, pairs = slots.k.shape[:4]
    prefix = slots.bias.shape[1]
    for layer in range(L):
        for r in range(R):
            first = prefix + min(slots.length[r], tokens)
            for step in range(count[r]):
                source, target = first + path[r, step], first + step
                if source == target:
                    continue
                for g in range(G):
                    k, v = slots.k[layer, r, g], slots.v[layer, r, g]
                    for pair in range(pairs):
                        k[pair, target] = k[pair, source]
                    for j in range(v.shape[1]):
                        old, new = v[target >> 1, j], i32(v[source >> 1, j] >> i32(16 * (source & 1)))
                        v[target >> 1, j] = join_pair(old, new) if target & 1 else join_pair(new, i32(old >> i32(16)))
                    slots.k_scale[layer, r, g, target] = slots.k_scale[layer, r, g, source]
                    slots.v_scale[layer, r, g, target] = slots.v_scale[layer, r, g, source]

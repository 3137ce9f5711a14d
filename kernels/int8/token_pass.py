"""A whole decoding pass of a Llama-like transformer on a CPU as one compiled function, over buffers allocated once.

Between its products of 8-bit integers, which read each weight once, are four steps a layer: norm and quantize; dequantize,
rotate, write the cache, attend, quantize; dequantize, add, norm, quantize; dequantize, SwiGLU, quantize. The result is bit for
bit that of the operators in `vargen.kernels.int8.arithmetic`, for any number of tokens and rows.

Shape suffixes: L layers, R rows (images; twice as many under guidance), B images, T tokens of the pass, M = R T, D width, H
query heads, G key heads, K head width, F hidden width, S cache slots, P prefix slots, V vocabulary, N output channels of all
products of a layer, each product padded to a multiple of 64.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from vargen.kernels.int8.attention import attend_slots, join_pair, write_tokens
from vargen.kernels.int8.format import PANEL, QUERIES, pack_matrix
from vargen.kernels.int8.steps import (
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

__all__ = [
    "PANEL",
    "Slots",
    "Weights",
    "advance",
    "make_buffers",
    "move_slots",
    "pack_matrix",
    "run_layers",
    "run_output",
]


class Weights(NamedTuple):
    """Weights of the layers that a pass runs, and of the output layer; numbers of `sizes` are H, G, K, F.

    `packed` has the addresses of the four matrices of each layer: queries, keys and values; attention output; gate and up;
    down. `start` and `scale` have their initial sums and channel scales one after the other.
    """

    sizes: Annotated[np.ndarray, "int64 [4]"]
    packed: Annotated[np.ndarray, "int64 [L, 4]"]
    start: Annotated[np.ndarray, "int32 [L, N]"]
    scale: Annotated[np.ndarray, "float32 [L, N]"]
    norms: Annotated[np.ndarray, "float32 [2 L + 1, D]"]
    output: Annotated[np.ndarray, "int8 [V' D]"]  # packed
    output_start: Annotated[np.ndarray, "int32 [V']"]
    output_scale: Annotated[np.ndarray, "float32 [V']"]
    embedding: Annotated[np.ndarray, "float32 [V, D]"]
    rotary: Annotated[np.ndarray, "float32 [tokens, K/2, 2]"]
    eps: float


class Slots(NamedTuple):
    """The cache of a pass, and the largest integers of keys and of values."""

    k: Annotated[np.ndarray, "int32 [L, R, G, K/2, S]"]  # pairs of 16-bit integers: see `cpu_attention`
    v: Annotated[np.ndarray, "int32 [L, R, G, S/2, K']"]
    k_scale: Annotated[np.ndarray, "float32 [L, R, G, S]"]
    v_scale: Annotated[np.ndarray, "float32 [L, R, G, S]"]
    length: Annotated[np.ndarray, "int64 [R]"]
    bias: Annotated[np.ndarray, "float32 [R, P]"]
    limits: tuple[int, int]


class Buffers(NamedTuple):
    """Intermediate results of a pass over at most M tokens of all rows."""

    x: Annotated[np.ndarray, "float32 [M, D]"]
    wide: Annotated[np.ndarray, "uint8 [M, D']"]  # D': the larger of D and H K, rounded up to 4
    hidden: Annotated[np.ndarray, "uint8 [M, F rounded up to 4]"]
    scale: Annotated[np.ndarray, "float32 [M]"]
    sums: Annotated[np.ndarray, "int32 [M N']"]  # N' the most columns of a product
    attended: Annotated[np.ndarray, "float32 [M, H K]"]
    row: Annotated[np.ndarray, "float32 [>= S + 4]"]  # the longest row and the slots
    dots: Annotated[np.ndarray, "int32 [4, S]"]
    attention: Annotated[np.ndarray, "int16 [4, S]"]
    value_sums: Annotated[np.ndarray, "int32 [4, K']"]
    q: Annotated[np.ndarray, "int16 [R, G, H/G T + 3, K]"]
    q_scale: Annotated[np.ndarray, "float32 [R, G, H/G T]"]
    cos_sin: Annotated[np.ndarray, "float32 [R, T, K/2, 2]"]
    length: Annotated[np.ndarray, "int64 [R]"]
    reach: Annotated[np.ndarray, "int64 [R, T]"]


def make_buffers(weights: Weights, slots: Slots, tokens: int) -> Buffers:
    """Allocate buffers for passes of up to `tokens` tokens."""
    H, G, K, F = (int(size) for size in weights.sizes)
    R, D, S = slots.k.shape[1], weights.norms.shape[1], slots.k.shape[4]
    M, queries = R * tokens, H // G * tokens
    columns = max(weights.start.shape[1], len(weights.output_start))
    return Buffers(
        x=np.zeros((M, D), np.float32),
        wide=np.full((M, -(-max(D, H * K) // 4) * 4), 128, np.uint8),
        hidden=np.full((M, -(-F // 4) * 4), 128, np.uint8),
        scale=np.zeros(M, np.float32),
        sums=np.zeros(M * columns, np.int32),
        attended=np.zeros((M, H * K), np.float32),
        row=np.zeros(max(D, F, (H + 2 * G) * K, S) + QUERIES, np.float32),
        dots=np.zeros((QUERIES, S), np.int32),
        attention=np.zeros((QUERIES, S), np.int16),
        value_sums=np.zeros((QUERIES, slots.v.shape[4]), np.int32),
        q=np.zeros((R, G, queries + QUERIES - 1, K), np.int16),
        q_scale=np.zeros((R, G, queries), np.float32),
        cos_sin=np.zeros((R, tokens, K // 2, 2), np.float32),
        length=np.zeros(R, np.int64),
        reach=np.zeros((R, tokens), np.int64),
    )


@compiled(Weights, Slots, Buffers, "int64 [B, T]", "int64 [R, T]", "bool [R, T, T]")
def run_layers(weights, slots, buffers, tokens, positions, ancestors):
    """Run all layers over tokens int64 `[B, T]`, after the pointer of each row. `buffers.x` becomes the last residual.

    Writes the cache, but does not move its pointers.

    Args:
        positions: int64 `[R, T]`, grid cells, which are clamped to the last one; `[0, 0]`: consecutive from the pointer.
        ancestors: bool `[R, T, T]`, which tokens of the pass each token attends to; `[R, 0, 0]` for a chain.
    """
    H, G, K, F = weights.sizes
    R, T = slots.k.shape[1], tokens.shape[1]
    M, D = R * T, weights.norms.shape[1]
    x, scale, sums, row, wide = buffers.x[:M], buffers.scale, buffers.sums, buffers.row, buffers.wide
    q, q_scale, cos_sin, length = buffers.q, buffers.q_scale, buffers.cos_sin, buffers.length
    last = len(weights.rotary) - 1
    for r in range(R):
        length[r] = slots.length[r] if slots.length[r] <= last else last + 1  # full rows write only to scratch
        for t in range(T):
            buffers.reach[r, t] = T if ancestors.shape[1] else t + 1
            cell = positions[r, t] if len(positions) else length[r] + t
            cell = cell if cell < last else last
            for j in range(K // 2):
                cos_sin[r, t, j, 0], cos_sin[r, t, j, 1] = weights.rotary[cell, j, 0], weights.rotary[cell, j, 1]
    for r in range(R):
        for t in range(T):
            for d in range(D):
                buffers.x[r * T + t, d] = weights.embedding[tokens[r % len(tokens), t], d]
    prefix = slots.bias.shape[1]
    columns_of = ((H + 2 * G) * K, D, 2 * F, D)
    for layer in range(len(weights.packed)):
        first = 0
        for stage in range(4):  # a loop, so that the product is compiled only once
            columns = -(-columns_of[stage] // PANEL) * PANEL
            factors, inputs = (buffers.hidden, F) if stage == 3 else (wide, H * K if stage == 1 else D)
            if stage & 1 == 0:
                norm_rows(x, weights.norms[2 * layer + (stage >> 1)], weights.eps, row, wide, scale)
            start, channels = weights.start[layer, first:], weights.scale[layer, first:]
            product(factors, M, weights.packed[layer, stage], start, -(-inputs // 4), sums, columns)
            first += columns
            if stage == 0:
                k, v, k_scale, v_scale = slots.k[layer], slots.v[layer], slots.k_scale[layer], slots.v_scale[layer]
                write_tokens(
                    sums, columns, scale, channels, cos_sin, length, prefix, slots.limits, k, v, k_scale, v_scale, q, q_scale,
                    row, T, K, H,
                )  # fmt: skip
                attend_slots(
                    q, q_scale, k, v, k_scale, v_scale, slots.bias, length, prefix, buffers.reach, ancestors,
                    buffers.dots, row, buffers.attention, buffers.value_sums, buffers.attended, T, H,
                )  # fmt: skip
                for m in range(M):
                    scale[m] = quantize(buffers.attended[m], H * K, wide[m])
            elif stage == 2:
                swiglu_rows(sums, columns, scale, channels, M, F, row, buffers.hidden)
            else:
                add_rows(x, sums, columns, scale, channels)


def run_output(weights, buffers, guidance, states, features, logits):
    """Run the final norm, guidance and the output layer over `buffers.x`.

    Args:
        guidance: float32 `[B, T]`, scales of classifier-free guidance between the first and the last B rows; `[0, 0]` without.
        states, features: float32 `[R, T, D]`, written: residuals before and after the final norm.
        logits: float32 `[B, T, V]`, written; all R rows without guidance.
    """
    _run_output(
        weights.norms[-1], weights.eps, weights.output, weights.output_start, weights.output_scale, buffers.x, buffers.row,
        buffers.scale, buffers.wide, buffers.sums, guidance, states, features, logits,
    )  # fmt: skip


@compiled(
    "float32 [D]", float, "int8 [V' D]", "int32 [V']", "float32 [V']", "float32 [M, D]", "float32 [S]", "float32 [M]",
    "uint8 [M, D']", "int32 [M N']", "float32 [B, T]", "float32 [R, T, D]", "float32 [R, T, D]", "float32 [B, T, V]",
)  # fmt: skip
def _run_output(
    norm_weight, eps, matrix, start, channel_scale, x, row, scale, wide, sums, guidance, states, features, logits
):  # fmt: skip
    """`run_output` with only the arrays that it needs, because each takes time to compile."""
    R, T, D = states.shape
    V, columns = logits.shape[2], len(start)
    for r in range(R):
        for t in range(T):
            for d in range(D):
                states[r, t, d] = x[r * T + t, d]
            norm(states[r, t], norm_weight, eps, features[r, t])
    B = len(guidance)
    rows = B if B else R
    for r in range(rows):
        for t in range(T):
            m = r * T + t
            if B:
                for d in range(D):
                    row[d] = (features[r, t, d] - features[B + r, t, d]) * guidance[r, t] + features[B + r, t, d]
                scale[m] = quantize(row, D, wide[m])
            else:
                scale[m] = quantize(features[r, t], D, wide[m])
    product(wide, rows * T, i64(matrix.ctypes.data), start, -(-D // 4), sums, columns)
    for r in range(rows):
        for t in range(T):
            m = r * T + t
            a, line = scale[m], sums[m * columns : m * columns + V]
            for v in range(V):
                logits[r, t, v] = f32(line[v]) * a * channel_scale[v]


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

"""A whole pass of a next-scale transformer (`vargen.models.var.network`) on a CPU as one compiled function.

Between its products of 8-bit integers are four steps a layer: modulate and quantize; dequantize, write the cache, attend,
quantize; dequantize, add, modulate, quantize; dequantize, GELU, quantize. A row's result does not depend on the number of
tokens and rows of a pass.

Shape suffixes: L layers, R rows (images; twice as many under guidance), B images, T tokens of the pass in each row, M = R T, n
tokens with logits, D width, H heads, K head width, F hidden width, S cache slots, P prefix slots, V vocabulary, N output
channels of all products of a layer, each product padded to a multiple of 64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import config, njit

from vargen.kernels.int8.attention import QUERIES, attend_slots
from vargen.kernels.int8.scale_steps import add_gained, gelu_rows, modulate, modulate_rows, write_scale_tokens
from vargen.kernels.int8.steps import OPTIONS, PANEL, f32, i64, pack_matrix, product, quantize

__all__ = ["Slots", "Weights", "make_buffers", "pack_matrix", "run_head", "run_layers"]
# `vargen.kernels.int8.load` sets the folder of compiled code before it imports this module.
_COMPILED = {**OPTIONS, "no_cfunc_wrapper": True, "cache": bool(config.CACHE_DIR)}


class Weights(NamedTuple):
    """Weights of the layers; the numbers of `sizes` are D, F, and whether queries and keys are normalized.

    `packed` has the addresses of the four matrices of each layer: queries, keys and values; attention output; the two of the
    feed-forward. `start`, `scale` and `bias` have their initial sums, channel scales and biases one after the other.
    """

    sizes: np.ndarray  # int64 [3]
    packed: np.ndarray  # int64 [L, 4]
    start: np.ndarray  # int32 [L, N]
    scale: np.ndarray  # float32 [L, N]
    bias: np.ndarray  # float32 [L, N]
    sharpness: np.ndarray  # float32 [L, H], factors of the scores


class Slots(NamedTuple):
    """The cache of a pass, and the largest integers of keys and of values. A slice of the rows is contiguous."""

    k: np.ndarray  # int32 [R, L, H, K/2, S], pairs of 16-bit integers: see `cpu_attention`
    v: np.ndarray  # int32 [R, L, H, S/2, K']
    k_scale: np.ndarray  # float32 [R, L, H, S]
    v_scale: np.ndarray  # float32 [R, L, H, S]
    bias: np.ndarray  # float32 [R, P], added to the scores of the first P slots
    limits: tuple[int, int]


class Buffers(NamedTuple):
    """Intermediate results of a pass over at most M tokens of all rows, T of each."""

    wide: np.ndarray  # uint8 [M, D rounded up to 4]
    hidden: np.ndarray  # uint8 [M, F rounded up to 4]
    scale: np.ndarray  # float32 [M]
    sums: np.ndarray  # int32 [M N'], N' the most columns of a product
    attended: np.ndarray  # float32 [M, D]
    row: np.ndarray  # float32, the longest row and the slots
    dots: np.ndarray  # int32 [4, S]
    attention: np.ndarray  # int16 [4, S]
    value_sums: np.ndarray  # int32 [4, K']
    q: np.ndarray  # int16 [1, H, T + 3, K]
    q_scale: np.ndarray  # float32 [1, H, T]
    hidden_slots: np.ndarray  # bool [1, 0, 0]: none
    length: np.ndarray  # int64 [1], zero


def _padded(columns: int) -> int:
    return -(-columns // PANEL) * PANEL


def make_buffers(weights: Weights, slots: Slots, rows: int, tokens: int, output: int) -> Buffers:
    """Allocate buffers for passes of `rows` rows with up to `tokens` tokens.

    Args:
        output: columns of the output layer.
    """
    D, F, _ = (int(size) for size in weights.sizes)
    H, S = slots.k_scale.shape[2:]
    M = rows * tokens
    return Buffers(
        wide=np.full((M, -(-D // 4) * 4), 128, np.uint8),
        hidden=np.full((M, -(-F // 4) * 4), 128, np.uint8),
        scale=np.zeros(M, np.float32),
        sums=np.empty(M * max(output, _padded(3 * D), _padded(F)), np.int32),
        attended=np.empty((M, D), np.float32),
        row=np.zeros(max(3 * D, F, S) + QUERIES, np.float32),
        dots=np.zeros((QUERIES, S), np.int32),
        attention=np.zeros((QUERIES, S), np.int16),
        value_sums=np.zeros((QUERIES, slots.v.shape[4]), np.int32),
        q=np.zeros((1, H, tokens + QUERIES - 1, D // H), np.int16),
        q_scale=np.zeros((1, H, tokens), np.float32),
        hidden_slots=np.zeros((1, 0, 0), np.bool_),
        length=np.zeros(1, np.int64),
    )


@njit(**_COMPILED)
def run_layers(weights, slots, buffers, x, modulation, reach, place):
    """Run all layers over float32 `x [R T, D]`, which becomes the last residual; keys and values are written from `place` on.

    Args:
        modulation: float32 `[L, 6, R, D]`: gains of attention and feed-forward, factors, shifts of the norms.
        reach: int64 `[R, T]`, number of slots from `place` on that are visible to each token; 0: it sees nothing at all.
    """
    D, F, unit = weights.sizes
    R, T = reach.shape
    M, H = len(x), slots.k.shape[2]
    scale, sums, row = buffers.scale, buffers.sums, buffers.row
    columns_of = (3 * D, D, F, D)
    for layer in range(len(weights.packed)):
        first = i64(0)
        for stage in range(4):  # a loop, so that the product is compiled only once
            columns = -(-columns_of[stage] // PANEL) * PANEL
            factors, inputs = (buffers.hidden, F) if stage == 3 else (buffers.wide, D)
            if stage & 1 == 0:
                half = stage >> 1
                modulate_rows(x, modulation[layer, 2 + half], modulation[layer, 4 + half], T, row, buffers.wide, scale)
            start, channels, bias = weights.start[layer, first:], weights.scale[layer, first:], weights.bias[layer, first:]
            product(factors, M, weights.packed[layer, stage], start, -(-inputs // 4), sums, columns)
            first += columns
            if stage == 0:
                for r in range(R):
                    write_scale_tokens(
                        sums, columns, scale, channels, bias, weights.sharpness[layer], unit, place, slots.limits,
                        slots.k[r, layer], slots.v[r, layer], slots.k_scale[r, layer], slots.v_scale[r, layer], buffers.q,
                        buffers.q_scale, row, r * T, T,
                    )  # fmt: skip
                    end = layer + 1
                    attend_slots(
                        buffers.q, buffers.q_scale, slots.k[r, layer:end], slots.v[r, layer:end], slots.k_scale[r, layer:end],
                        slots.v_scale[r, layer:end], slots.bias[r : r + 1], buffers.length, place, reach[r : r + 1],
                        buffers.hidden_slots, buffers.dots, row, buffers.attention, buffers.value_sums,
                        buffers.attended[r * T : (r + 1) * T], T, H,
                    )  # fmt: skip
                for m in range(M):
                    scale[m] = quantize(buffers.attended[m], D, buffers.wide[m])
            elif stage == 2:
                gelu_rows(sums, columns, scale, channels, bias, M, F, row, buffers.hidden)
            else:
                add_gained(x, sums, columns, scale, channels, bias, modulation[layer, stage >> 1], T)


@njit(**_COMPILED)
def run_head(x, modulation, matrix, start, channel_scale, bias, guidance, row, scale, wide, sums, features, logits):
    """Run the final norm, guidance and the output layer over the last n tokens of each row.

    Args:
        x: float32 `[R, T, D]`.
        modulation: float32 `[2, R, D]`.
        matrix, start, channel_scale, bias: of the output layer, packed.
        guidance: float32 `[n]`, strengths g of c + g (c - u), between the first and the last B rows; `[0]` without.
        row, scale, wide, sums: of `Buffers`.
        features: float32 `[R, n, D]`, written; under guidance, the first B rows are guided.
        logits: float32 `[B, n, V]`, written; all R rows without guidance.
    """
    R, n, D = features.shape
    skip, B, V, columns = x.shape[1] - n, len(logits), logits.shape[2], len(start)
    for r in range(R):
        for t in range(n):
            modulate(x[r, skip + t], modulation[0, r], modulation[1, r], features[r, t])
    for r in range(B):
        for t in range(n):
            if len(guidance):
                for d in range(D):
                    conditional = features[r, t, d]
                    features[r, t, d] = conditional + (conditional - features[B + r, t, d]) * guidance[t]
            scale[r * n + t] = quantize(features[r, t], D, wide[r * n + t])
    product(wide, B * n, i64(matrix.ctypes.data), start, -(-D // 4), sums, columns)
    for r in range(B):
        for t in range(n):
            m = r * n + t
            a, line = scale[m], sums[m * columns : m * columns + V]
            for v in range(V):
                logits[r, t, v] = f32(line[v]) * a * channel_scale[v] + bias[v]

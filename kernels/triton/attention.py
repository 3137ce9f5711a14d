"""Tree attention of a pass over a static cache, with keys split over programs (split-K).

K/V of the pass are already in the cache, in the slots after the committed tokens of each row, so prefix and tree are one range
of slots: [ conditioning prefix | committed image tokens | fed tokens | unused ]. A query attends to prefix slots with their
additive bias (LlamaGen's whole prefix is exactly one slot of key 0, value mean(v) and bias log n), to all committed slots, and
among the fed slots to itself and its ancestors, which are bits of 64-bit words. Chains, which need no words, and windows are
special cases of trees.

Stage 1, `_attend`, grid `(R H_kv, ceil(T G' / BM), S)`, where G' = H / H_kv query heads share a key head. A program owns BM
(token, query head) pairs of one row and key head, which share each key tile that it reads, and one of S parts of the row's
slots. In tiles of BN slots, it first processes the tiles that need a mask (prefix bias, tree, ends), then, without a mask, the
tiles with committed tokens only. It keeps a running maximum, sum and weighted values in float32 (online softmax in base 2), and
writes the output of its part and its log-sum-exp. Lengths are read on the device, so the grid does not depend on them.

Stage 2, `_merge_splits`, grid `(R T H)`: out = sum_s 2^lse_s out_s / sum_s 2^lse_s. With S = 1, stage 1 writes the output.

Bytes moved per layer: keys and values once, 2 R H_kv (P + length + T) D; queries and output, 2 R T H D; words, 8 T W; and for
S > 1 partial outputs twice, 8 S R T H (D + 1).

Slots after the T tokens are never loaded, so they may contain NaN. A query without visible keys gets zeros.

Shape suffixes: R rows, T tokens of the pass, H query heads, G key heads, S slots (in shapes), K head width, P prefix slots, W
words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.dispatch import launch, needs_upcast
from vargen.kernels.ops import KernelMask

_LOG2E = tl.constexpr(1.4426950408889634)
_FINITE_MIN = tl.constexpr(-1.0e30)  # finite, to avoid inf - inf in rows without visible keys


class Tiles(NamedTuple):
    """Tile of `queries` x `keys`, and the warps and pipeline stages of a program; which are fastest has not been measured."""

    queries: int
    keys: int
    warps: int
    stages: int


# For two-byte dtypes, by maximum head width and maximum number of queries: without register spills on sm_80, sm_90 and sm_100.
TILES: dict[tuple[int, int], Tiles] = {
    (64, 16): Tiles(16, 64, 4, 3),
    (64, 32): Tiles(32, 64, 4, 3),
    (64, 64): Tiles(64, 64, 4, 2),
    (128, 16): Tiles(16, 64, 4, 2),
    (128, 32): Tiles(32, 64, 8, 2),
    (128, 64): Tiles(64, 32, 4, 2),
}
FLOAT32 = {64: Tiles(16, 32, 4, 2), 128: Tiles(16, 32, 8, 2)}  # by maximum head width; exact products, without tensor cores

_TARGET_PROGRAMS = 2 * 132  # two per multiprocessor of an H100 or H200
_MIN_SPLIT_KEYS = 256  # minimum keys of a split, at the longest context; shorter ranges have no second launch
_MAX_SPLITS = 16


def choose_tiles(queries: int, width: int, dtype: torch.dtype) -> Tiles:
    """Return the tile for `queries` (token, query head) pairs of one key head."""
    wide = 64 if width <= 64 else 128
    if dtype == torch.float32:
        return FLOAT32[wide]
    return TILES[wide, 16 if queries <= 16 else 32 if queries <= 32 else 64]


def choose_splits(programs: int, slots: int, keys: int) -> int:
    """Return the number of splits of the keys, a power of two, given the number of programs without splits.

    It depends only on shapes, so that a captured graph is valid for all lengths.
    """
    most = min(_TARGET_PROGRAMS // programs, _MAX_SPLITS)  # limited: each partial output is written and read once more
    splits = 1
    while 2 * splits <= most and slots >= 2 * splits * max(_MIN_SPLIT_KEYS, keys):
        splits *= 2
    return splits


@triton.jit
def _online_softmax(scores, v, m, mass, acc, UPCAST: tl.constexpr):
    """Update the online softmax with one tile: `scores` float32 [BM, BN] in base 2, `v` [BN, BLOCK_D]."""
    m_new = tl.maximum(m, tl.max(scores, 1))
    shrink = tl.exp2(m - m_new)
    p = tl.exp2(scores - m_new[:, None])
    acc = tl.dot(p if UPCAST else p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return m_new, mass * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["T", "earlier"])
def _attend(
    q_ptr,  # [R, T, H, D], by strides
    k_ptr,  # [R, G, slots, D_LOAD or more], by strides; the same for v
    v_ptr,
    out_ptr,  # [R, T, H, D] for SPLITS = 1, else float32 [R, T, H, SPLITS, D]
    lse_ptr,  # float32 [R, T, H, SPLITS]; None for SPLITS = 1
    length_ptr,  # int64 or int32 [R], number of committed image tokens
    bits_ptr,  # int64 [bits_rows, T, WORDS]; None: a chain
    bias_ptr,  # float32 [R, P], natural units
    stride_qr,
    stride_qt,
    stride_qh,
    stride_kr,
    stride_kh,
    stride_ks,
    T,
    earlier,
    slots,
    P,
    bits_rows,
    scale,
    G_SIZE: tl.constexpr,  # query heads per key head
    HEADS: tl.constexpr,  # key heads
    D: tl.constexpr,
    D_LOAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    WORDS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row, head, split = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(2)
    pair = tl.program_id(1) * BM + tl.arange(0, BM)
    t, query_head = pair // G_SIZE, head * G_SIZE + pair % G_SIZE
    live = t < T
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BN)

    base = tl.minimum(P + tl.load(length_ptr + row).to(tl.int32), slots)  # clamped: no slot past the last is read
    total = tl.minimum(base + earlier + T, slots)
    part = tl.cdiv(tl.cdiv(total, BN), SPLITS) * BN
    low = split * part
    high = tl.minimum(low + part, total)
    # Tiles within [middle, middle_end) contain only committed image tokens.
    middle = tl.maximum(low, tl.cdiv(P, BN) * BN)
    middle_end = tl.maximum(middle, tl.minimum(high, base // BN * BN))
    before = tl.maximum(tl.cdiv(tl.minimum(high, middle) - low, BN), 0)  # masked tiles before them
    tail_tiles = tl.maximum(tl.cdiv(high - tl.maximum(low, middle_end), BN), 0)

    q_at = row.to(tl.int64) * stride_qr + t[:, None] * stride_qt + query_head[:, None] * stride_qh + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    k_first = row.to(tl.int64) * stride_kr + head.to(tl.int64) * stride_kh
    k_ptr += k_first
    v_ptr += k_first
    if UPCAST:
        q = q.to(tl.float32)
    factor = scale * _LOG2E
    if bits_ptr is not None:
        words = bits_ptr + (row % bits_rows) * T * WORDS + t * WORDS
        word = tl.load(words, mask=live, other=0)

    m = tl.full([BM], _FINITE_MIN, dtype=tl.float32)
    mass = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, BLOCK_D], dtype=tl.float32)

    for tile in range(0, before + tail_tiles):
        slot = n + tl.where(tile < before, low + tile * BN, tl.maximum(low, middle_end) + (tile - before) * BN)
        there = slot < total
        at = slot[:, None] * stride_ks + d[None, :]
        k = tl.load(k_ptr + at, mask=there[:, None] & (d < D_LOAD)[None, :], other=0.0)
        v = tl.load(v_ptr + at, mask=there[:, None] & (d < D_LOAD)[None, :], other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        bias = tl.load(bias_ptr + row * P + slot, mask=there & (slot < P), other=0.0) * _LOG2E
        drafted = slot - base  # negative: committed
        if bits_ptr is None:
            visible = drafted[None, :] <= earlier + t[:, None]
        else:
            bit = tl.maximum(drafted, 0)
            if WORDS == 1:
                seen = word[:, None] >> (bit & 63)[None, :].to(tl.int64)
            else:
                at_word = tl.minimum(bit // 64, WORDS - 1)
                seen = tl.load(words[:, None] + at_word[None, :], mask=live[:, None], other=0)
                seen = seen >> (bit & 63)[None, :].to(tl.int64)
            visible = (drafted < 0)[None, :] | ((seen & 1) != 0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor + bias[None, :]
        m, mass, acc = _online_softmax(tl.where(visible & there[None, :], scores, float("-inf")), v, m, mass, acc, UPCAST)

    for slot_0 in range(middle, middle_end, BN):
        at = (slot_0 + n)[:, None] * stride_ks + d[None, :]
        if D_LOAD == BLOCK_D:
            k = tl.load(k_ptr + at)
            v = tl.load(v_ptr + at)
        else:
            k = tl.load(k_ptr + at, mask=(d < D_LOAD)[None, :], other=0.0)
            v = tl.load(v_ptr + at, mask=(d < D_LOAD)[None, :], other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        m, mass, acc = _online_softmax(tl.dot(q, tl.trans(k), input_precision="ieee") * factor, v, m, mass, acc, UPCAST)

    some = mass > 0
    acc = acc / tl.where(some, mass, 1.0)[:, None]
    place = (row.to(tl.int64) * T + t) * (HEADS * G_SIZE) + query_head
    keep = live[:, None] & (d < D)[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + place[:, None] * D + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        place = place * SPLITS + split
        tl.store(out_ptr + place[:, None] * D + d[None, :], acc, mask=keep)
        tl.store(lse_ptr + place, tl.where(some, m + tl.log2(tl.where(some, mass, 1.0)), float("-inf")), mask=live)


@triton.jit
def _merge_splits(
    part_ptr,  # float32 [rows, SPLITS, D]
    lse_ptr,  # float32 [rows, SPLITS], base 2
    out_ptr,  # [rows, D]
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + place * SPLITS + s)
    most = tl.maximum(tl.max(lse, 0), _FINITE_MIN)
    weight = tl.exp2(lse - most)
    part = tl.load(part_ptr + (place * SPLITS + s)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    sum_ = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(sum_ > 0, sum_, 1.0)
    tl.store(out_ptr + place * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


def tree_attention(q_RTHK: Tensor, k_RGSK: Tensor, v_RGSK: Tensor, mask: KernelMask) -> Tensor:
    """Attention `[R, T, H, K]` of a pass whose K/V were written to the slots from P + length + earlier on.

    Offsets within a row and head must be below 2^31.

    Args:
        q_RTHK: queries; the last dimension must be contiguous.
        k_RGSK, v_RGSK: one layer of the cache, with equal strides; H / G query heads share a key head. If each slot is padded
            to a multiple of 8 numbers, the padding is read as well, and must be finite.
    """
    if k_RGSK.dtype != q_RTHK.dtype:  # as under autocast
        raise ValueError(f"queries must have the dtype of the cache, {k_RGSK.dtype}, got {q_RTHK.dtype}")
    R, T, H, K = q_RTHK.shape
    _, G, slots, _ = k_RGSK.shape
    bits, earlier, P = mask.ancestor_bits, mask.num_earlier, mask.prefix_bias.shape[1]
    tiles = choose_tiles(T * (H // G), K, q_RTHK.dtype)
    blocks = triton.cdiv(T * (H // G), tiles.queries)
    splits = choose_splits(R * G * blocks, slots, tiles.keys)
    out = q_RTHK.new_empty(R, T, H, K)
    part, lse = out, None
    if splits > 1:
        part = q_RTHK.new_empty(R, T, H, splits, K, dtype=torch.float32)
        lse = q_RTHK.new_empty(R, T, H, splits, dtype=torch.float32)
    stride = k_RGSK.stride(2)
    padded = -(-K // 8) * 8  # multiples of 16 bytes for 2-byte dtypes, if slots are padded
    # The padding must not overlap other data, such as the next head of a cache [R, S, G, K].
    roomy = stride % 8 == 0 and min(k_RGSK.stride()[:3]) >= padded
    block = max(triton.next_power_of_2(K), 16)
    words = None if bits is None else bits.contiguous()
    bits_rows = 1 if bits is None or bits.dim() == 2 else len(bits)
    operands = q_RTHK, k_RGSK, v_RGSK, part, lse, mask.length.contiguous(), words, mask.prefix_bias.contiguous()
    strides = *q_RTHK.stride()[:3], *k_RGSK.stride()[:3]
    # Rows and heads on the first axis, because the others are limited to 65,535.
    launch(
        _attend,
        (R * G, blocks, splits),
        *operands,
        *strides,
        *(T, earlier, slots, P, bits_rows, K**-0.5),
        G_SIZE=H // G,
        HEADS=G,
        D=K,
        D_LOAD=padded if roomy else K,
        BLOCK_D=block,
        BM=tiles.queries,
        BN=tiles.keys,
        SPLITS=splits,
        WORDS=1 if bits is None else bits.shape[-1],
        UPCAST=needs_upcast(q_RTHK.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        launch(_merge_splits, (R * T * H,), part, lse, out, D=K, BLOCK_D=block, SPLITS=splits, num_warps=1)
    return out

"""Committing the accepted path of a tree: moves its keys and values to consecutive slots in all layers, advances pointers.

`_compact_kv`, grid `(R G, layers)`: a program owns one row and key head of one layer. It reads K and V of the whole path, up to
A slots, before it writes any of them, so source and target may overlap. The last program of a row to finish, determined by a
counter in memory that returns to zero, advances the row's pointer, which no other program reads any more. It takes one launch,
and the host reads nothing. A chain needs no launch, because its tokens are already in consecutive slots.

Bytes moved: at most 8 layers R G D (A - 1) in two-byte dtypes, less if the path starts with first children.

Shape suffixes: R rows, G key heads, S slots, K head width, A slots of the longest path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.triton.launch import launch


@triton.jit(do_not_specialize=["A", "limit", "last"])
def _compact_kv(
    k_ptr,  # [layers, R, G, slots, D], by strides; the same for v
    v_ptr,
    path_ptr,  # int64 [R, A], indices of the pass's tokens, increasing
    count_ptr,  # int64 [R]
    length_ptr,  # int64 [R], advanced by count
    arrivals_ptr,  # int32 [R], zero before and after
    stride_l,
    stride_r,
    stride_h,
    stride_s,
    A,
    image_start,
    limit,
    last,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    layer, row, head = tl.program_id(1), tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    step, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_D)
    count, length = tl.load(count_ptr + row), tl.load(length_ptr + row)
    path = tl.load(path_ptr + row * A + step, mask=step < A, other=0)
    base = image_start + tl.minimum(length, limit)
    moves = (step < count) & (path != step) & (base + path <= last)
    store = layer.to(tl.int64) * stride_l + row.to(tl.int64) * stride_r + head.to(tl.int64) * stride_h
    source = store + (base + path)[:, None] * stride_s + d[None, :]
    target = store + (base + step)[:, None] * stride_s + d[None, :]
    mask = moves[:, None] & (d < D)[None, :]
    k = tl.load(k_ptr + source, mask=mask)
    v = tl.load(v_ptr + source, mask=mask)
    tl.debug_barrier()  # all threads must have read
    tl.store(k_ptr + target, k, mask=mask)
    tl.store(v_ptr + target, v, mask=mask)
    ended = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
    if ended == tl.num_programs(1) * HEADS - 1:
        tl.store(length_ptr + row, length + count)
        tl.store(arrivals_ptr + row, 0)


def compact_kv(
    k_LRGSK: Tensor,
    v_LRGSK: Tensor,
    length_R: Tensor,
    path_RA: Tensor,
    count_R: Tensor,
    arrivals_R: Tensor,
    *,
    image_start: int,
    grid_tokens: int,
) -> None:
    """Move the accepted tokens of every row to consecutive slots, in place, and advance the pointers past them.

    Args:
        k_LRGSK, v_LRGSK: keys and values of all layers, with equal strides.
        length_R: int64, number of cached image tokens; changed in place.
        path_RA: int64, accepted slots of the pass, root first; the first `count_R` of each row are strictly increasing.
        count_R: int64, number of accepted slots; 0 moves nothing.
        arrivals_R: int32 zeros, a counter of finished programs that is zero again afterwards.
        image_start: slot of image token 0.
        grid_tokens: number of tokens of the grid. Full rows write only after it.
    """
    layers, R, G, slots, K = k_LRGSK.shape
    A = path_RA.shape[1]
    if k_LRGSK.stride() != v_LRGSK.stride() or k_LRGSK.shape != v_LRGSK.shape or k_LRGSK.stride(-1) != 1:
        raise ValueError("k and v must be alike in shape and strides, with a contiguous last dimension")
    integers = {"length": length_R, "path": path_RA, "count": count_R}
    if wrong := [name for name, given in integers.items() if given.dtype != torch.int64 or given.shape[0] != R]:
        given = integers[wrong[0]]
        raise ValueError(f"{wrong[0]} must be int64 of {R} rows, got {given.dtype} {list(given.shape)}")
    if not (
        length_R.is_contiguous() and arrivals_R.is_contiguous() and arrivals_R.dtype == torch.int32 and arrivals_R.shape == (R,)
    ):
        raise ValueError(f"length and arrivals, int32 of {R} rows, are changed in place and must be contiguous")
    block_a, block_d = triton.next_power_of_2(A), triton.next_power_of_2(K)
    launch(
        _compact_kv,
        (R * G, layers),  # the second axis is limited to 65,535
        k_LRGSK,
        v_LRGSK,
        path_RA.contiguous(),
        count_R.contiguous(),
        length_R,
        arrivals_R,
        *k_LRGSK.stride()[:4],
        A,
        image_start,
        grid_tokens,
        slots - 1,
        HEADS=G,
        D=K,
        BLOCK_A=block_a,
        BLOCK_D=block_d,
        num_warps=min(8, max(1, block_a * block_d // 1024)),
    )

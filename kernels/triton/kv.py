"""Committing the accepted path of a tree: moves its keys and values to consecutive slots in all layers, advances pointers.

`_compact_kv`, grid `(R G, 2 layers)`: a program owns the keys or the values of one row, key head and layer. It reads those of
the whole path, up to A slots, before it writes any of them, so source and target may overlap. The last program of a row to
finish, determined by a counter in memory that returns to zero, advances the row's pointer, which no other program reads any
more. It takes one launch, and the host reads nothing. A chain needs no launch, because its tokens are already in consecutive
slots.

Bytes moved: at most 8 layers R G D (A - 1) in two-byte dtypes, less if the path starts with first children.

Shape suffixes: L layers, R rows, G key heads, S slots, K head width, A slots of the longest path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.triton.launch import launch


@triton.jit(do_not_specialize=["A", "limit", "last"])
def _compact_kv(
    store_ptr,  # [2 layers, R, G, slots, D], by strides
    path_ptr,  # int64 [R, A], indices of the pass's tokens, increasing
    count_ptr,  # int64 [R]
    length_ptr,  # int64 [R], advanced by count
    arrivals_ptr,  # int32 [R], zero before and after
    stride_0,
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
    store, row, head = tl.program_id(1), tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    step, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_D)
    count, length = tl.load(count_ptr + row), tl.load(length_ptr + row)
    path = tl.load(path_ptr + row * A + step, mask=step < A, other=0)
    base = image_start + tl.minimum(length, limit)
    moves = (step < count) & (path != step) & (base + path <= last)
    first = store.to(tl.int64) * stride_0 + row.to(tl.int64) * stride_r + head.to(tl.int64) * stride_h
    source = first + (base + path)[:, None] * stride_s + d[None, :]
    target = first + (base + step)[:, None] * stride_s + d[None, :]
    mask = moves[:, None] & (d < D)[None, :]
    moved = tl.load(store_ptr + source, mask=mask)
    tl.debug_barrier()  # all threads must have read
    tl.store(store_ptr + target, moved, mask=mask)
    ended = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
    if ended == tl.num_programs(1) * HEADS - 1:
        tl.store(length_ptr + row, length + count)
        tl.store(arrivals_ptr + row, 0)


def compact_kv(
    kv_L2RGSK: Tensor,
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
        kv_L2RGSK: keys and values of all layers, contiguous but for padding between slots.
        length_R: int64, number of cached image tokens; contiguous, changed in place.
        path_RA: int64, accepted slots of the pass, root first; the first `count_R` of each row are strictly increasing.
        count_R: int64, number of accepted slots; 0 moves nothing.
        arrivals_R: int32 zeros, a contiguous counter of finished programs that is zero again afterwards.
        image_start: slot of image token 0.
        grid_tokens: number of tokens of the grid. Full rows write only after it.

    Raises:
        ValueError: for operands whose shapes, strides or dtypes do not match.
    """
    R, G, slots, K = kv_L2RGSK.shape[2:]
    stores = kv_L2RGSK.view(-1, R, G, slots, K)
    integers = {"length": length_R, "path": path_RA, "count": count_R}
    for name, given in integers.items():
        if given.dtype != torch.int64 or given.shape[0] != R:
            raise ValueError(f"{name} must be int64 of {R} rows, got {given.dtype} {list(given.shape)}")
    if arrivals_R.dtype != torch.int32 or arrivals_R.shape != (R,) or stores.stride(-1) != 1:
        raise ValueError(f"arrivals must be int32 of {R} rows, and the last dimension of keys and values contiguous")
    if not length_R.is_contiguous() or not arrivals_R.is_contiguous():
        raise ValueError("length and arrivals are changed in place and must be contiguous")
    block_a, block_d = triton.next_power_of_2(path_RA.shape[1]), triton.next_power_of_2(K)
    launch(
        _compact_kv,
        (R * G, len(stores)),  # the second axis is limited to 65,535
        stores,
        path_RA.contiguous(),
        count_R.contiguous(),
        length_R,
        arrivals_R,
        *stores.stride()[:4],
        path_RA.shape[1],
        image_start,
        grid_tokens,
        slots - 1,
        HEADS=G,
        D=K,
        BLOCK_A=block_a,
        BLOCK_D=block_d,
        num_warps=min(8, max(1, block_a * block_d // 1024)),
    )

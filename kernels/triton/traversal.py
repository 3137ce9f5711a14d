"""Traversal verification of a tree in one launch: whole paths, from the leaves to the root.

`_verify_traversal`, grid `(B,)`: a program owns one image. It visits the slots that have children in order, with the row of p
after each. Every child gets its reach, min(1, r p(x) / q(x)), and its rejection changes r and p for the next child
(`vargen.decoding.traversal` defines the rule). Reaches depend on no uniforms, so the first slot that
passes, children before parents, is then found for all slots in parallel. The residual of p at that slot is recomputed instead
of stored for every slot. Nothing depends on the host.

Bytes moved per image: 4 V for every slot with children and every draft.

Shape suffixes: B images, T fed tokens of the pass, A slots of the longest path, C maximum children of a slot, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.triton.launch import launch
from vargen.kernels.triton.noise import BRANCH, make_noise_key, uniform32, uniform64
from vargen.kernels.triton.sample import choose_warps, validate_row_size
from vargen.kernels.triton.selection import sample_by_uniform
from vargen.kernels.triton.verify_chain import ACCEPT, RESIDUAL
from vargen.kernels.triton.verify_tree import TreeVerdict, batch_stride, load_draft, pad_children


@triton.jit
def _reject_children(
    p,
    r,
    first,
    number,
    probs_ptr,
    q_ptr,
    tokens_ptr,
    valid_ptr,
    children,
    reach_ptr,
    lane,
    V: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    """Return p and r after all children of a slot are rejected, and store the reach of each child.

    `first` is the index of the image's first draft, `children` points to the slot's children.
    """
    for rank in range(0, number):
        child = tl.load(children + rank)
        at, there, valid, token = load_draft(child, first, tokens_ptr, valid_ptr, HAS_VALID)
        accept_prob = tl.sum(tl.where(lane == token, p, 0.0), 0) * r
        if HAS_Q:
            proposed = tl.load(q_ptr + at * V + token, mask=there, other=0.0)
            accept_prob = tl.where(proposed > 0, tl.math.div_rn(accept_prob, tl.where(proposed > 0, proposed, 1.0)), 0.0)
        tl.store(reach_ptr + child, tl.where(valid, tl.minimum(accept_prob, 1.0), 0.0), mask=there)
        if valid:
            if HAS_Q:
                rest = tl.maximum(p * r - tl.load((q_ptr + at * V) + lane, mask=lane < V, other=0.0), 0.0)
            else:
                rest = tl.where(lane == token, 0.0, p * r)
            total = tl.sum(rest, 0)
            fails = (total > 0) | (r < 1)  # otherwise p equals q, and the child is never rejected
            r = tl.where(fails, total / tl.where(fails, total + (1 - r), 1.0), 1.0)
            p = tl.where(total > 0, rest / tl.where(total > 0, total, 1.0), p)
    return p, r


@triton.jit(do_not_specialize=["T", "step"])
def _verify_traversal(
    probs_ptr,  # float32 [B, T, V]
    q_ptr,  # float32 [B, T - 1, V]; not read without HAS_Q
    tokens_ptr,  # int64 [B, T - 1]
    valid_ptr,  # bool [B, T - 1]; not read without HAS_VALID
    children_ptr,  # int64 [T, C] or [B, T, C], 0 for no child
    parents_ptr,  # int64 [T] or [B, T]
    depth_ptr,  # int64 [T] or [B, T]
    postorder_ptr,  # int64 [T] or [B, T]
    seeds_ptr,  # int64 [B]
    position_ptr,  # int64 [B, T]
    reach_ptr,  # float32 [B, T], scratch: reach of each slot, then the rest after its children
    initial_reach_ptr,  # float32 [B, T], scratch: reach of each slot
    path_ptr,  # int64 [B, A]
    count_ptr,  # int64 [B]
    next_ptr,  # int64 [B]
    T,
    A,
    C,
    stride_cb,
    stride_tb,
    step,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_A: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < V
    first = image * (T - 1)
    children_ptr += image * stride_cb
    reach_ptr += image * T
    initial_reach_ptr += image * T
    tl.store(reach_ptr, 1.0)
    tl.debug_barrier()
    for slot in range(0, T):
        r = tl.load(reach_ptr + slot)
        tl.store(initial_reach_ptr + slot, r)
        tl.debug_barrier()  # all threads must have read it before one overwrites it
        if tl.load(children_ptr + slot * C) > 0:
            p = tl.load((probs_ptr + (image * T + slot) * V) + lane, mask=inside, other=0.0)
            p, r = _reject_children(
                p, r, first, C, probs_ptr, q_ptr, tokens_ptr, valid_ptr, children_ptr + slot * C, reach_ptr, lane,
                V, HAS_Q, HAS_VALID,
            )  # fmt: skip
            tl.store(reach_ptr + slot, r)
            tl.debug_barrier()  # makes the reaches of the children visible to all threads
    tl.debug_barrier()

    slots = tl.arange(0, BLOCK_T)
    there = slots < T
    seed = tl.load(seeds_ptr + image)
    position = tl.load(position_ptr + image * T + slots, mask=there, other=0) + slots.to(tl.int64) * BRANCH
    passes = uniform32(make_noise_key(seed, position, ACCEPT, step)) < tl.load(reach_ptr + slots, mask=there, other=0.0)
    order = tl.load(postorder_ptr + image * stride_tb + slots, mask=there, other=0)
    last = tl.argmin(tl.where(there & (passes | (slots == 0)), order, T), 0).to(tl.int64)

    place = tl.arange(0, BLOCK_A)
    path = tl.zeros([BLOCK_A], dtype=tl.int64)
    depth = tl.load(depth_ptr + image * stride_tb + last)
    tl.store(count_ptr + image, depth + 1)
    slot = last
    while slot > 0:
        path = tl.where(place == depth, slot, path)
        slot = tl.load(parents_ptr + image * stride_tb + slot)
        depth -= 1
    tl.store(path_ptr + image * A + place, path, mask=place < A)

    p = tl.load((probs_ptr + (image * T + last) * V) + lane, mask=inside, other=0.0)
    tl.debug_barrier()  # all threads must have read the reaches before they are rewritten
    p, r = _reject_children(
        p, tl.load(initial_reach_ptr + last), first, C, probs_ptr, q_ptr, tokens_ptr, valid_ptr, children_ptr + last * C,
        reach_ptr, lane, V, HAS_Q, HAS_VALID,
    )  # fmt: skip
    noise = make_noise_key(seed, tl.load(position_ptr + image * T + last), RESIDUAL, step)
    tl.store(next_ptr + image, sample_by_uniform(p, uniform64(noise), BLOCK).to(tl.int64))


def verify_traversal(
    probs: Tensor,
    tokens: Tensor,
    q: Tensor | None,
    valid: Tensor | None,
    children: Tensor,
    parents: Tensor,
    depth: Tensor,
    postorder: Tensor,
    longest: int,
    seeds: Tensor,
    position: Tensor,
    step: int | Tensor,
) -> TreeVerdict:
    """Verify a tree with the rule of `vargen.decoding.traversal`.

    Args:
        probs, tokens, q, valid, seeds, position, step: as in `verify_chain.verify_chain`. For siblings sampled without
            replacement, q is zero at the earlier siblings.
        children, longest: as in `verify_tree.verify_shared_noise`.
        parents, depth, postorder: int64 `[T]` or `[B, T]`, from `vargen.decoding.Tree`.

    Raises:
        ValueError: for a larger vocabulary than a program can hold.
    """
    B, T, V = probs.shape
    validate_row_size(V)
    verdict = TreeVerdict.allocate(B, longest, probs.device)
    reach, given = (torch.empty(B, T, dtype=torch.float32, device=probs.device) for _ in range(2))
    children = pad_children(children)
    parents, depth, postorder = (each.contiguous() for each in (parents, depth, postorder))
    launch(
        _verify_traversal,
        (B,),
        *(probs if each is None else each.contiguous() for each in (probs, q, tokens, valid)),
        children,
        parents,
        depth,
        postorder,
        seeds.contiguous(),
        position.contiguous(),
        reach,
        given,
        *verdict,
        T,
        longest,
        children.shape[-1],
        batch_stride(children, 3),
        batch_stride(parents, 2),
        step,
        V=V,
        BLOCK=triton.next_power_of_2(V),
        BLOCK_T=triton.next_power_of_2(T),
        BLOCK_A=triton.next_power_of_2(longest),
        HAS_Q=q is not None,
        HAS_VALID=valid is not None,
        num_warps=choose_warps(V),
        enable_fp_fusion=False,
    )
    return verdict

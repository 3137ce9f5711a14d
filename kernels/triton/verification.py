"""Verification of drafts: a chain by p and q, a tree or chain by shared noise, a tree by traversal, in one launch each.

All have the grid `(B,)`: a program owns one image. Nothing depends on the host.

`_verify_chain`: exact or relaxed p / q acceptance. It finds the first rejected draft, for all drafts in parallel. Then it reads
the row of p (and q) at the end of the chain, and samples from norm((p - q)+) with one uniform. Relaxed rules pass an acceptance
probability for each draft. Its excess over min(1, p / q) decays with the depth and is capped by the budget along the chain, as
in `vargen.decoding.relaxed_rules`. Bytes moved: 8 V B for the rows to sample from, and a few for each draft.

`_verify_shared_noise`: it follows the accepted path, and reads no probabilities and no other slots: a few bytes per image.

`_verify_traversal`: the rule of `vargen.decoding.tree_rules.traversal`. It visits the slots that have children in order, with
the row of p after each, for the reach of every child. Then the first slot that passes, children before parents, is found for
all slots in parallel. The residual of p at that slot is recomputed instead of stored for every slot. Bytes moved per image: 4 V
for every slot with children and every draft.

Shape suffixes: B images, T fed tokens of the pass, A slots of the longest path, C maximum children of a slot, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.dispatch import launch
from vargen.kernels.triton.sampler import (
    ACCEPT,
    BRANCH,
    RESIDUAL,
    make_noise_key,
    row_options,
    sample_by_uniform,
    uniform32,
    uniform64,
)


def _operands(*given: Tensor | None) -> list[Tensor | None]:
    """Operands of a kernel, contiguous."""
    return [None if each is None else each.contiguous() for each in given]


@triton.jit(do_not_specialize=["T"])
def _verify_chain(
    probs_ptr,  # float32 [B, T, V]
    q_ptr,  # float32 [B, T - 1, V]; None: drafts are deterministic
    tokens_ptr,  # int64 [B, T - 1]
    valid_ptr,  # bool [B, T - 1]; None: all are valid
    accept_prob_ptr,  # float32 [B, T - 1]; None, as the next and the last: exact
    spent_ptr,  # float32 [B]
    seeds_ptr,  # int64 [B]
    position_ptr,  # int64 [B, T]
    count_ptr,  # int64 [B]
    next_ptr,  # int64 [B]
    relaxation_ptr,  # float32 [B], written
    T,
    budget,
    tightening,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK_T)
    there = draft < T - 1
    at = image * (T - 1) + draft
    token = tl.load(tokens_ptr + at, mask=there, other=0)
    p = tl.load(probs_ptr + (image * T + draft) * V + token, mask=there, other=0.0)
    q = tl.full([BLOCK_T], 1.0, dtype=tl.float32)
    if q_ptr is not None:
        q = tl.load(q_ptr + at * V + token, mask=there, other=1.0)
    allowed = there
    if valid_ptr is not None:
        allowed = there & (tl.load(valid_ptr + at, mask=there, other=0) != 0)
    seed = tl.load(seeds_ptr + image)
    u = uniform32(make_noise_key(seed, tl.load(position_ptr + image * T + draft, mask=there, other=0), ACCEPT))
    if accept_prob_ptr is not None:
        exact = tl.where(q > 0, tl.minimum(tl.math.div_rn(p, tl.where(q > 0, q, 1.0)), 1.0), 0.0)
        accept_prob = tl.load(accept_prob_ptr + at, mask=there, other=0.0)
        allowance = tl.maximum(tl.minimum(accept_prob, 1.0) - exact, 0.0) * tl.exp(-tightening * draft.to(tl.float32))
        allowance = tl.where(allowed, allowance, 0.0)
        upto = tl.cumsum(allowance, 0)
        limit = tl.maximum(budget - tl.load(spent_ptr + image), 0.0)
        allowance = tl.where(upto <= limit, allowance, tl.maximum(limit - (upto - allowance), 0.0))
        accepted = allowed & (u < exact + allowance)
    else:
        accepted = allowed & (u * q < p)
    row = tl.min(tl.where(there & ~accepted, draft, T - 1), 0)
    tl.store(count_ptr + image, (row + 1).to(tl.int64))
    if accept_prob_ptr is not None:
        tl.store(relaxation_ptr + image, tl.sum(tl.where(draft <= row, allowance, 0.0), 0))

    lane = tl.arange(0, BLOCK)
    target = tl.load((probs_ptr + (image * T + row) * V) + lane, mask=lane < V, other=0.0)
    last = image * (T - 1) + tl.minimum(row, tl.maximum(T - 2, 0))
    rejected = row < T - 1
    if valid_ptr is not None:
        rejected = rejected & (tl.load(valid_ptr + last, mask=rejected, other=0) != 0)
    if q_ptr is not None:
        residual = tl.maximum(target - tl.load((q_ptr + last * V) + lane, mask=(lane < V) & rejected, other=0.0), 0.0)
    else:
        residual = tl.where(lane == tl.load(tokens_ptr + last, mask=rejected, other=-1).to(tl.int32), 0.0, target)
    target = tl.where(rejected & (tl.sum(residual, 0) > 0), residual, target)
    noise = make_noise_key(seed, tl.load(position_ptr + image * T + row), RESIDUAL)
    tl.store(next_ptr + image, sample_by_uniform(target, uniform64(noise), BLOCK).to(tl.int64))


def verify_chain(
    probs: Tensor,
    tokens: Tensor,
    q: Tensor | None,
    valid: Tensor | None,
    seeds: Tensor,
    position: Tensor,
    *,
    accept_prob: Tensor | None = None,
    relaxation: Tensor | None = None,
    budget: float | None = None,
    tightening: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Verify a chain, with the noise of `vargen.decoding.rules`.

    Args:
        probs: float32 `[B, T, V]`, target probabilities after each fed slot.
        tokens, q, valid: as in `vargen.decoding.Draft`: int64, float32 and bool `[B, T - 1]`, q with V.
        seeds, position: int64 `[B]` and `[B, T]`, see `vargen.decoding.noise.Noise.key`.
        accept_prob, relaxation: of a relaxed rule, as the kernel takes them: probabilities, and what earlier passes spent.
        budget, tightening: see `vargen.decoding.RelaxedRule`.

    Returns:
        The number of accepted slots with the root and the token after them, int64 `[B]`, and the relaxation spent, float32
        `[B]`, of a relaxed rule.
    """
    B, T, V = probs.shape
    count, next_token = torch.empty(2, B, dtype=torch.int64, device=probs.device)
    spent = None if accept_prob is None else torch.empty(B, dtype=torch.float32, device=probs.device)
    given = probs, q, tokens, valid, accept_prob, relaxation, seeds, position, count, next_token, spent
    launch(
        _verify_chain,
        (B,),
        *_operands(*given),
        *(T, float("inf") if budget is None else budget, tightening),
        BLOCK_T=triton.next_power_of_2(max(T - 1, 1)),
        **row_options(V),
    )
    return count, next_token, spent


# -- trees: shared noise -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def _verify_shared_noise(
    sampled_ptr,  # int64 [B, T], tokens that the image's own noise samples after each slot
    tokens_ptr,  # int64 [B, T - 1]
    children_ptr,  # int64 [T, C] or [B, T, C], 0 for no child
    path_ptr,  # int64 [B, A]
    count_ptr,  # int64 [B]
    next_ptr,  # int64 [B]
    T,
    A,
    C,
    TREE_OF_IMAGE: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    if TREE_OF_IMAGE:
        children_ptr += image * T * C
    place = tl.arange(0, BLOCK_A)
    path = tl.zeros([BLOCK_A], dtype=tl.int64)
    node = tl.zeros([], dtype=tl.int64)
    sampled = tl.load(sampled_ptr + image * T)
    count = 1
    rank = 0
    while rank < C:
        child = tl.load(children_ptr + node * C + rank)
        token = tl.load(tokens_ptr + image * (T - 1) + child - 1, mask=child > 0, other=-1)
        rank += 1
        if token == sampled:
            node = child
            path = tl.where(place == count, child, path)
            count += 1
            rank = 0
            sampled = tl.load(sampled_ptr + image * T + node)
    tl.store(path_ptr + image * A + place, path, mask=place < A)
    tl.store(count_ptr + image, tl.zeros([], dtype=tl.int64) + count)
    tl.store(next_ptr + image, sampled)


def verify_shared_noise(sampled: Tensor, tokens: Tensor, children: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Verify a tree or chain with the rule `shared_noise`: a draft is accepted if it equals the token after its parent.

    Args:
        sampled, tokens, children: as the kernel takes them; children are in order.
        longest: number of slots of the longest path, A.

    Returns:
        The accepted slots, root first, padded with 0, int64 `[B, A]`; their number, and the token after them, `[B]` each.
    """
    B, T = sampled.shape
    path = torch.empty(B, longest, dtype=torch.int64, device=sampled.device)
    count, next_token = torch.empty(2, B, dtype=torch.int64, device=sampled.device)
    launch(
        _verify_shared_noise,
        (B,),
        *_operands(sampled, tokens, children, path, count, next_token),
        *(T, longest, children.shape[-1]),
        TREE_OF_IMAGE=children.dim() == 3,
        BLOCK_A=triton.next_power_of_2(longest),
        num_warps=1,
    )
    return path, count, next_token


# -- trees: traversal ----------------------------------------------------------------------------------------------------------


@triton.jit
def _reject_children(p, r, first, number, q_ptr, tokens_ptr, valid_ptr, children, reach_ptr, lane, V: tl.constexpr):
    """Return p and r after all children of a slot are rejected, and store the reach of each child.

    `first` is the index of the image's first draft, `children` points to the slot's children.
    """
    for rank in range(0, number):
        child = tl.load(children + rank)
        at, there = first + tl.maximum(child - 1, 0), child > 0  # 0: no child
        valid = there
        if valid_ptr is not None:
            valid = there & (tl.load(valid_ptr + at, mask=there, other=0) != 0)
        token = tl.load(tokens_ptr + at, mask=valid, other=0).to(tl.int32)
        accept_prob = tl.sum(tl.where(lane == token, p, 0.0), 0) * r
        if q_ptr is not None:
            proposed = tl.load(q_ptr + at * V + token, mask=there, other=0.0)
            accept_prob = tl.where(proposed > 0, tl.math.div_rn(accept_prob, tl.where(proposed > 0, proposed, 1.0)), 0.0)
        tl.store(reach_ptr + child, tl.where(valid, tl.minimum(accept_prob, 1.0), 0.0), mask=there)
        if valid:
            if q_ptr is not None:
                rest = tl.maximum(p * r - tl.load((q_ptr + at * V) + lane, mask=lane < V, other=0.0), 0.0)
            else:
                rest = tl.where(lane == token, 0.0, p * r)
            total = tl.sum(rest, 0)
            fails = (total > 0) | (r < 1)  # otherwise p equals q, and the child is never rejected
            r = tl.where(fails, total / tl.where(fails, total + (1 - r), 1.0), 1.0)
            p = tl.where(total > 0, rest / tl.where(total > 0, total, 1.0), p)
    return p, r


@triton.jit(do_not_specialize=["T"])
def _verify_traversal(
    probs_ptr,  # float32 [B, T, V]
    q_ptr,  # float32 [B, T - 1, V]; None: drafts are deterministic
    tokens_ptr,  # int64 [B, T - 1]
    valid_ptr,  # bool [B, T - 1]; None: all are valid
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
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE_OF_IMAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < V
    first = image * (T - 1)
    if TREE_OF_IMAGE:
        children_ptr += image * T * C
        parents_ptr += image * T
        depth_ptr += image * T
        postorder_ptr += image * T
    reach_ptr += image * T
    initial_reach_ptr += image * T
    tl.store(reach_ptr, 1.0)
    tl.debug_barrier()
    for slot in range(0, T):
        r = tl.load(reach_ptr + slot)
        tl.store(initial_reach_ptr + slot, r)
        tl.debug_barrier()  # all threads must have read it before one overwrites it
        if tl.load(children_ptr + slot * C, mask=slot < T * C, other=0) > 0:  # of the root alone, C is 0
            p = tl.load((probs_ptr + (image * T + slot) * V) + lane, mask=inside, other=0.0)
            children = children_ptr + slot * C
            p, r = _reject_children(p, r, first, C, q_ptr, tokens_ptr, valid_ptr, children, reach_ptr, lane, V)
            tl.store(reach_ptr + slot, r)
            tl.debug_barrier()  # makes the reaches of the children visible to all threads
    tl.debug_barrier()

    slots = tl.arange(0, BLOCK_T)
    there = slots < T
    seed = tl.load(seeds_ptr + image)
    position = tl.load(position_ptr + image * T + slots, mask=there, other=0) + slots.to(tl.int64) * BRANCH
    passes = uniform32(make_noise_key(seed, position, ACCEPT)) < tl.load(reach_ptr + slots, mask=there, other=0.0)
    order = tl.load(postorder_ptr + slots, mask=there, other=0)
    last = tl.argmin(tl.where(there & (passes | (slots == 0)), order, T), 0).to(tl.int64)

    place = tl.arange(0, BLOCK_A)
    path = tl.zeros([BLOCK_A], dtype=tl.int64)
    depth = tl.load(depth_ptr + last)
    tl.store(count_ptr + image, depth + 1)
    slot = last
    while slot > 0:
        path = tl.where(place == depth, slot, path)
        slot = tl.load(parents_ptr + slot)
        depth -= 1
    tl.store(path_ptr + image * A + place, path, mask=place < A)

    p = tl.load((probs_ptr + (image * T + last) * V) + lane, mask=inside, other=0.0)
    tl.debug_barrier()  # all threads must have read the reaches before they are rewritten
    r, children = tl.load(initial_reach_ptr + last), children_ptr + last * C
    p, r = _reject_children(p, r, first, C, q_ptr, tokens_ptr, valid_ptr, children, reach_ptr, lane, V)
    noise = make_noise_key(seed, tl.load(position_ptr + image * T + last), RESIDUAL)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify a tree with the rule of `vargen.decoding.tree_rules.traversal`.

    Args:
        probs, tokens, q, valid, seeds, position: as in `verify_chain`. For siblings sampled without replacement, q is zero
            at the earlier siblings.
        children, parents, depth, postorder, longest: of a `vargen.decoding.Tree`, as the kernel takes them.

    Returns:
        As `verify_shared_noise`.
    """
    B, T, V = probs.shape
    path = torch.empty(B, longest, dtype=torch.int64, device=probs.device)
    count, next_token = torch.empty(2, B, dtype=torch.int64, device=probs.device)
    reaches = torch.empty(2, B, T, dtype=torch.float32, device=probs.device)
    given = probs, q, tokens, valid, children, parents, depth, postorder, seeds, position, *reaches
    launch(
        _verify_traversal,
        (B,),
        *_operands(*given, path, count, next_token),
        *(T, longest, children.shape[-1]),
        TREE_OF_IMAGE=children.dim() == 3,
        BLOCK_T=triton.next_power_of_2(T),
        BLOCK_A=triton.next_power_of_2(longest),
        **row_options(V),
    )
    return path, count, next_token

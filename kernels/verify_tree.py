"""Verification of a tree of drafts from the root down, in one launch.

Rules: `shared_noise`, which needs no probabilities, and `recursive_rejection`, for siblings sampled with or without
replacement, or deterministic.

Grid `(B,)`: a program owns one image and follows the accepted path; other slots are not read. `_verify_shared_noise` compares
each draft with the token that the image's own noise samples after its parent. `_verify_recursive_rejection` holds the row of p
after the current slot. It tests the children in order, u < p(x) / q(x), and replaces p by norm((p - q)+) at each rejection. If
all are rejected, or there are none, it samples from the residual with one uniform. Uniforms are those of
`vargen.decoding.next_token.acceptance.siblings`. Nothing depends on the host.

Bytes moved per image: a few for `_verify_shared_noise`; for `_verify_recursive_rejection` 4 V for each slot on the path and
each tested sibling.

Shape suffixes: B images, T fed tokens of the pass, A slots of the longest path, C maximum children of a slot, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.counter_noise import BRANCH, make_noise_key, uniform32, uniform64
from vargen.kernels.launch import launch
from vargen.kernels.sampler import choose_warps, validate_row_size
from vargen.kernels.selection import sample_by_uniform
from vargen.kernels.verify_chain import ACCEPT, RESIDUAL


@triton.jit
def load_draft(child, first, tokens_ptr, valid_ptr, HAS_VALID: tl.constexpr):
    """Return the index of the draft of slot `child`, whether it exists (0: none), whether it is valid, and its token.

    `first` is the index of the image's first draft.
    """
    at = first + tl.maximum(child - 1, 0)
    there = child > 0
    valid = there
    if HAS_VALID:
        valid = there & (tl.load(valid_ptr + at, mask=there, other=0) != 0)
    return at, there, valid, tl.load(tokens_ptr + at, mask=valid, other=0).to(tl.int32)


@triton.jit
def residual_after_rejection(p, q_row_ptr, token, lane, inside, HAS_Q: tl.constexpr):
    """norm((p - q)+), or p if the residual is zero. A deterministic draft has q = 1 at its token."""
    left = tl.where(lane == token, 0.0, p)
    if HAS_Q:
        left = tl.maximum(p - tl.load(q_row_ptr + lane, mask=inside, other=0.0), 0.0)
    total = tl.sum(left, 0)
    return tl.where(total > 0, left / tl.where(total > 0, total, 1.0), p)


@triton.jit(do_not_specialize=["T", "step"])
def _verify_recursive_rejection(
    probs_ptr,  # float32 [B, T, V]
    q_ptr,  # float32 [B, T - 1, V]; not read without HAS_Q
    tokens_ptr,  # int64 [B, T - 1]
    valid_ptr,  # bool [B, T - 1]; not read without HAS_VALID
    children_ptr,  # int64 [T, C] or [B, T, C], 0 for no child
    seeds_ptr,  # int64 [B]
    position_ptr,  # int64 [B, T]
    path_ptr,  # int64 [B, A]
    count_ptr,  # int64 [B]
    next_ptr,  # int64 [B]
    T,
    A,
    C,
    stride_cb,
    step,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_A: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < V
    place = tl.arange(0, BLOCK_A)
    path = tl.zeros([BLOCK_A], dtype=tl.int64)
    seed = tl.load(seeds_ptr + image)
    node = tl.zeros([], dtype=tl.int64)
    count = 1
    probs_ptr += image * T * V
    p = tl.load(probs_ptr + lane, mask=inside, other=0.0)
    rank = tl.zeros([], dtype=tl.int64)
    while rank < C:
        child = tl.load(children_ptr + image * stride_cb + node * C + rank)
        at, _, valid, token = load_draft(child, image * (T - 1), tokens_ptr, valid_ptr, HAS_VALID)
        own = tl.sum(tl.where(lane == token, p, 0.0), 0)
        if HAS_Q:
            own = tl.math.div_rn(own, tl.load(q_ptr + at * V + token, mask=valid, other=1.0))
        position = tl.load(position_ptr + image * T + node) + rank * BRANCH
        accepted = valid & (uniform32(make_noise_key(seed, position, ACCEPT, step)) < own)
        if accepted:
            node = child
            path = tl.where(place == count, child, path)
            count += 1
            rank = tl.zeros([], dtype=tl.int64)
            p = tl.load((probs_ptr + node * V) + lane, mask=inside, other=0.0)
        else:
            rank += 1
            if valid:
                p = residual_after_rejection(p, q_ptr + at * V, token, lane, inside, HAS_Q)
    tl.store(path_ptr + image * A + place, path, mask=place < A)
    tl.store(count_ptr + image, tl.zeros([], dtype=tl.int64) + count)
    noise = make_noise_key(seed, tl.load(position_ptr + image * T + node), RESIDUAL, step)
    tl.store(next_ptr + image, sample_by_uniform(p, uniform64(noise), BLOCK).to(tl.int64))


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
    stride_cb,
    BLOCK_A: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_A)
    path = tl.zeros([BLOCK_A], dtype=tl.int64)
    node = tl.zeros([], dtype=tl.int64)
    sampled = tl.load(sampled_ptr + image * T)
    count = 1
    rank = 0
    while rank < C:
        child = tl.load(children_ptr + image * stride_cb + node * C + rank)
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


class TreeVerdict(NamedTuple):
    """Verdicts on trees.

    Attributes:
        path: int64 `[B, A]`, accepted slots, root first, padded with 0.
        num_committed: int64 `[B]`, number of accepted slots.
        next_token: int64 `[B]`.
    """

    path: Tensor
    num_committed: Tensor
    next_token: Tensor

    @classmethod
    def allocate(cls, B: int, A: int, device: torch.device) -> TreeVerdict:
        shapes = ((B, A), (B,), (B,))
        return cls(*(torch.empty(shape, dtype=torch.int64, device=device) for shape in shapes))


def batch_stride(table: Tensor, dims: int) -> int:
    """Stride between the images of a table; 0 if all images share it."""
    return table.stride(0) if table.dim() == dims else 0


def pad_children(children: Tensor) -> Tensor:
    """Make the table contiguous, with at least one column even if the root has no children."""
    return children.contiguous() if children.shape[-1] else torch.nn.functional.pad(children, (0, 1))


def verify_recursive_rejection(
    probs: Tensor,
    tokens: Tensor,
    q: Tensor | None,
    valid: Tensor | None,
    children: Tensor,
    longest: int,
    seeds: Tensor,
    position: Tensor,
    step: int | Tensor,
) -> TreeVerdict:
    """Verify a tree with the rule `recursive_rejection`.

    Args:
        probs, tokens, q, valid, seeds, position, step: as in `verify_chain.verify_chain`. For siblings sampled without
            replacement, q is zero at the earlier siblings.
        children: int64 `[T, C]` or `[B, T, C]`, the children of each slot in order, padded with 0.
        longest: number of slots of the longest path, A.

    Raises:
        ValueError: for a larger vocabulary than a program can hold.
    """
    B, T, V = probs.shape
    validate_row_size(V)
    verdict = TreeVerdict.allocate(B, longest, probs.device)
    children = pad_children(children)
    launch(
        _verify_recursive_rejection,
        (B,),
        *(probs if each is None else each.contiguous() for each in (probs, q, tokens, valid)),
        children,
        seeds.contiguous(),
        position.contiguous(),
        *verdict,
        T,
        longest,
        children.shape[-1],
        batch_stride(children, 3),
        step,
        V=V,
        BLOCK=triton.next_power_of_2(V),
        BLOCK_A=triton.next_power_of_2(longest),
        HAS_Q=q is not None,
        HAS_VALID=valid is not None,
        num_warps=choose_warps(V),
        enable_fp_fusion=False,
    )
    return verdict


def verify_shared_noise(sampled: Tensor, tokens: Tensor, children: Tensor, longest: int) -> TreeVerdict:
    """Verify a tree or chain with the rule `shared_noise`: a draft is accepted if it equals the token after its parent.

    Args:
        sampled: int64 `[B, T]`, tokens that the image's own noise samples after each slot.
        tokens, children, longest: as in `verify_recursive_rejection`.
    """
    B, T = sampled.shape
    verdict = TreeVerdict.allocate(B, longest, sampled.device)
    children = pad_children(children)
    launch(
        _verify_shared_noise,
        (B,),
        sampled.contiguous(),
        tokens.contiguous(),
        children,
        *verdict,
        T,
        longest,
        children.shape[-1],
        batch_stride(children, 3),
        BLOCK_A=triton.next_power_of_2(longest),
        num_warps=1,
    )
    return verdict

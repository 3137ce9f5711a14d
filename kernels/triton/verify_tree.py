"""Verification of a tree of drafts with shared noise, in one launch, and what kernels for trees have in common.

Grid `(B,)`: a program owns one image and follows the accepted path; other slots are not read. It compares each draft with the
token that the image's own noise samples after its parent, so it reads no probabilities: a few bytes per image. Nothing depends
on the host.

Shape suffixes: B images, T fed tokens of the pass, A slots of the longest path, C maximum children of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vargen.kernels.triton.launch import launch


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


def verify_shared_noise(sampled: Tensor, tokens: Tensor, children: Tensor, longest: int) -> TreeVerdict:
    """Verify a tree or chain with the rule `shared_noise`: a draft is accepted if it equals the token after its parent.

    Args:
        sampled: int64 `[B, T]`, tokens that the image's own noise samples after each slot.
        tokens: int64 `[B, T - 1]`, the drafts.
        children: int64 `[T, C]` or `[B, T, C]`, the children of each slot in order, padded with 0.
        longest: number of slots of the longest path, A.
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

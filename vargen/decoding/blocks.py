"""The video loop: both models see every finished block, whoever drew it; see `vargen.decoding.block_stream`.

There is no ratio of probabilities to test here, so routing is relaxed: what stands is what a score says is good enough. Source:
Hu and Zhang 2026, SDVG, arXiv:2604.17397; the sampler is that of Huang et al. 2025, Self Forcing, arXiv:2506.08009.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.block_pixels import BlockDecoder
from vargen.decoding.block_protocols import BlockModel
from vargen.decoding.block_score import Score
from vargen.decoding.block_stream import BlockStream, Callback
from vargen.decoding.methods import resolve_accelerator
from vargen.decoding.routing import Routing
from vargen.values import shown, whole

MOST_BLOCKS = 1_000_000


def decode_blocks(
    model: BlockModel,
    condition: Any,
    seed: int,
    method: str | Routing = "target",
    *,
    blocks: int,
    decoder: BlockDecoder,
    preview: BlockDecoder | None = None,
    score: Score | None = None,
    given: Sequence[Tensor] = (),
    callback: Callback | None = None,
    profile: bool = False,
) -> BlockStream:
    """Make a video of `blocks` blocks, one at a time, as the result is iterated over.

    Args:
        model: the large model, with the small one as its `draft_model`.
        condition: passed to `start` of both.
        seed: of all noise. A block's depends on seed, block and step alone, so no decision shifts the noise of later blocks.
        method: a preset's name or a `Routing`.
        decoder: of the frames that come out. preview: a cheaper one, of the frames that are scored.
        score: of drafts, for methods that ask for it. What it raises, or a score that is not finite, is a rejection.
        given: latents `[1, F', C, Y, X]` that the video begins with, such as those of a picture; they are not yielded.
        callback: called after every pass; returning False ends the run before the block is finished.
        profile: on CUDA, wait for the device between parts so that seconds are known by part.

    Raises:
        ValueError: for an unknown method or one that these models cannot run, or a number out of range.
        TypeError: for arguments of another type.
        NonFiniteLatentsError: while iterating, where the target's latents are not finite, or a draft's in the method `draft`.
    """
    if isinstance(model, type) or not isinstance(model, BlockModel):
        raise TypeError(f"model must be a BlockModel, got {shown(model)}")
    routing = resolve_accelerator(method, Routing.family)
    if whole(blocks, 1, MOST_BLOCKS) is None:
        raise ValueError(f"blocks must be a whole number from 1 to {MOST_BLOCKS}, got {shown(blocks)}")
    if whole(seed, -(2**63), 2**63 - 1) is None:
        raise ValueError(f"seed must be a whole number of 64 bits, got {shown(seed)}")
    for name, function in (("callback", callback), ("score", score)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function or None, got {shown(function)}")
    for latents in given:
        if not isinstance(latents, Tensor) or latents.ndim != 5 or latents.shape[2:] != torch.Size(model.block_shape[1:]):
            raise ValueError(f"given must be latents [1, F, *{list(model.block_shape[1:])}], got {_shape(latents)}")
    routing.check(model, score is not None)
    return BlockStream(model, condition, int(seed), routing, int(blocks), decoder, preview, score, given, callback, profile)


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else shown(value)

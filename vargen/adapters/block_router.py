"""Adapter of a pipeline's `BlockRouter` for the block loop."""

from __future__ import annotations

from typing import Any

import torch

from vargen.decoding.video.interfaces import DraftRouter, DraftView
from vargen.decoding.video.policies import VideoMethod
from vargen.weight_files import weights_digest


def drafter_digest(pipe: Any, exit_step: int) -> str:
    """Return the digest of the network that makes the drafts, the same in float32 and bfloat16."""
    return weights_digest(pipe.transformer if exit_step else pipe.draft_transformer, dtype=torch.bfloat16)


def bind_router(pipe: Any, method: VideoMethod) -> DraftRouter | None:
    """Return the router of a pipeline for a method, or None if the method needs none or there is none."""
    router = pipe.router
    if router is None or not method.policy.needs_router:
        return None
    router.validate_drafter(drafter_digest(pipe, method.exit_step), method.exit_step)

    def rank(view: DraftView) -> float:
        return float(router(view.latents, view.previous, view.first, view.number)[0])

    return rank

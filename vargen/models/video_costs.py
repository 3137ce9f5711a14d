"""Projected speedup of drafting with a causal video transformer, from the operations of passes alone: nothing is measured."""

from __future__ import annotations

from types import SimpleNamespace

from vargen.models.causal_video import estimate_pass_flops
from vargen.models.causal_video_geometry import VideoGeometry


def project_speedup(
    target: object,
    draft: object,
    geometry: VideoGeometry,
    acceptance: float,
    steps: int = 4,
    draft_steps: int = 4,
    blocks: int = 7,
    text: int = 512,
    shares_cache: bool = False,
) -> float:
    """Return how many times as fast as the target alone `sdvg` would be if time were proportional to operations.

    Each finished block but the last passes once through each cache. Decoding and scoring are not counted, and
    all frames are visible.

    Args:
        target, draft: configurations of the networks.
        geometry: of the videos.
        acceptance: share of the drafts that are accepted, from 0 to 1. The target generates block 0.
        steps, draft_steps: denoising steps of a block.
        blocks: length of the video.
        text: rows of the prompt.
        shares_cache: whether both are one network, and one cache serves both.
    """
    tokens = geometry.block_tokens

    def cost(config: object, passes: float, block: int) -> float:
        return passes * estimate_pass_flops(config, tokens, tokens * (block + 1), text)

    alone = drafted = 0.0
    for block in range(blocks):
        update = int(block + 1 < blocks)
        alone += cost(target, steps + update, block)
        drafted += cost(target, update, block) + (0.0 if shares_cache else cost(draft, update, block))
        drafted += cost(target, steps if block == 0 else (1 - acceptance) * steps, block)
        drafted += cost(draft, draft_steps, block) if block else 0.0
    return alone / drafted


WAN_1_3B = SimpleNamespace(dim=1536, ffn_dim=8960, num_layers=30)
WAN_14B = SimpleNamespace(dim=5120, ffn_dim=13824, num_layers=40)

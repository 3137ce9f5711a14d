"""The presets of block-wise video models, each a few lines of data."""

from __future__ import annotations

from vargen.decoding.video.policies import LearnedRouting, SingleModel, Stride, Threshold, VideoMethod

VIDEO_METHODS: tuple[VideoMethod, ...] = (
    VideoMethod(
        name="target",
        summary="the large model generates every block: the baseline",
        source="Huang et al. 2025, Self Forcing, arXiv 2506.08009",
    ),
    VideoMethod(
        name="sdvg",
        policy=Threshold(),
        summary="the small model drafts; the large model generates blocks whose worst frame scores below tau",
        source="Hu and Zhang 2026, SDVG, arXiv 2604.17397, with lazy cache updates",
    ),
    VideoMethod(
        name="sdvg-learned",
        policy=LearnedRouting(0.9),
        summary="sdvg that a trained router decides, from what the small model computed; nothing is decoded or scored",
        source="as sdvg",
    ),
    VideoMethod(
        name="early-exit",
        policy=SingleModel(draft=True),
        exit_step=1,
        summary="the large model stops after its first step, in every block but the first; no small model",
        source="as target; consistency models make such estimates: Song et al. 2023, arXiv 2303.01469",
        experimental=True,
    ),
    VideoMethod(
        name="stride",
        policy=Stride(),
        summary="the large model generates every third block, without scores: what a scorer must beat",
        source="StrideAR, a public model card",
    ),
)

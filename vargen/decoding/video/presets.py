"""The presets of block-wise video models, each a few lines of data."""

from __future__ import annotations

from vargen.decoding.video.method import VideoMethod
from vargen.decoding.video.policies import (
    AdaptiveThreshold,
    QuantileThreshold,
    RandomShare,
    RelativeThreshold,
    SingleModel,
    Stride,
    Threshold,
)
from vargen.decoding.video.routing import LearnedRouting

VIDEO_METHODS: tuple[VideoMethod, ...] = (
    VideoMethod(
        name="target",
        summary="the large model generates every block: the baseline",
        source="Huang et al. 2025, Self Forcing, arXiv 2506.08009",
    ),
    VideoMethod(
        name="draft",
        policy=SingleModel(draft=True),
        target_blocks=(),
        summary="the small model generates every block: the fast end",
        source="as target",
        experimental=True,
    ),
    VideoMethod(
        name="sdvg",
        policy=Threshold(),
        summary="the small model drafts; the large model generates blocks whose worst frame scores below tau",
        source="Hu and Zhang 2026, SDVG, arXiv 2604.17397, with lazy cache updates",
    ),
    VideoMethod(
        name="sdvg-relative",
        policy=RelativeThreshold(),
        summary="sdvg with a threshold relative to the score of the large model's first block",
        source="as sdvg",
        experimental=True,
    ),
    VideoMethod(
        name="sdvg-quantile",
        policy=QuantileThreshold(),
        summary="sdvg that rejects the worst share of the latest drafts",
        source="as sdvg",
        experimental=True,
    ),
    VideoMethod(
        name="sdvg-budget",
        policy=AdaptiveThreshold(),
        summary="sdvg that adjusts tau until a share of the drafts is accepted",
        source="as sdvg",
        experimental=True,
    ),
    VideoMethod(
        name="sdvg-capped",
        policy=Threshold(),
        max_accepted_in_row=3,
        pause_after_rejections=4,
        summary="sdvg with at most three drafts in a row, and a pause after four rejections",
        source="as sdvg",
        experimental=True,
    ),
    VideoMethod(
        name="sdvg-refine",
        policy=Threshold(),
        refine=2,
        summary="sdvg whose rejected drafts get noise and are finished by the large model's last steps",
        source="as sdvg, and Meng et al. 2021, SDEdit, arXiv 2108.01073",
        experimental=True,
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
    VideoMethod(
        name="chance",
        policy=RandomShare(),
        summary="the small model generates a random share of the blocks: what a scorer must beat",
        source="the ablation of SDVG",
        experimental=True,
    ),
)

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

VIDEO_METHODS: tuple[VideoMethod, ...] = (
    VideoMethod(
        name="target",
        summary="every block by the large model: the baseline",
        source="Huang et al. 2025, Self Forcing, arXiv 2506.08009",
    ),
    VideoMethod(
        name="draft",
        policy=SingleModel(draft=True),
        forced=(),
        summary="every block by the small model: the other end",
        source="as target",
        experimental=True,
    ),
    VideoMethod(
        name="sdvg",
        policy=Threshold(),
        summary="the small model drafts; a block whose worst frame scores below tau is the large model's",
        source="Hu and Zhang 2026, SDVG, arXiv 2604.17397, with lazy commits",
    ),
    VideoMethod(
        name="sdvg-relative",
        policy=RelativeThreshold(),
        summary="sdvg whose threshold is the score of the large model's first block, less delta",
        source="as sdvg",
        experimental=True,
    ),
    VideoMethod(
        name="sdvg-quantile",
        policy=QuantileThreshold(),
        summary="sdvg that refuses the worst share of the latest drafts",
        source="as sdvg",
        experimental=True,
    ),
    VideoMethod(
        name="sdvg-budget",
        policy=AdaptiveThreshold(),
        summary="sdvg whose tau is moved until a share of the drafts is accepted",
        source="as sdvg",
        experimental=True,
    ),
    VideoMethod(
        name="sdvg-capped",
        policy=Threshold(),
        longest_run=3,
        off_after=4,
        summary="sdvg with at most three drafts in a row, and none after four refusals",
        source="as sdvg",
        experimental=True,
    ),
    VideoMethod(
        name="sdvg-refine",
        policy=Threshold(),
        refine=2,
        summary="sdvg whose refused drafts are noised, and finished by the large model's last steps",
        source="as sdvg, and Meng et al. 2021, SDEdit, arXiv 2108.01073",
        experimental=True,
    ),
    VideoMethod(
        name="stride",
        policy=Stride(),
        summary="every third block by the large model, unseen: what a scorer must beat",
        source="StrideAR, a public model card",
    ),
    VideoMethod(
        name="chance",
        policy=RandomShare(),
        summary="a share of the blocks by the small model, by coins: what a scorer must beat",
        source="the ablation of SDVG",
        experimental=True,
    ),
)

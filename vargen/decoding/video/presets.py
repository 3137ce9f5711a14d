"""The methods of block-wise video models by name, each a few lines of data."""

from __future__ import annotations

from vargen.decoding.method import register_methods
from vargen.decoding.video.method import Routing
from vargen.decoding.video.policies import Budget, Chance, RelativeToFirst, RunningQuantile, Stride, Threshold, Unscored

register_methods(
    Routing(
        name="target",
        summary="every block by the large model: the baseline",
        source="Huang et al. 2025, Self Forcing, arXiv 2506.08009",
    ),
    Routing(
        name="draft",
        policy=Unscored(draft=True),
        forced=(),
        summary="every block by the small model: the other end",
        source="as target",
    ),
    Routing(
        name="sdvg",
        policy=Threshold(),
        summary="the small model drafts; a block whose worst frame scores below tau is the large model's",
        source="Hu and Zhang 2026, SDVG, arXiv 2604.17397, with lazy commits",
    ),
    Routing(
        name="sdvg-relative",
        policy=RelativeToFirst(),
        summary="sdvg whose threshold is the score of the large model's first block, less delta",
        source="as sdvg",
    ),
    Routing(
        name="sdvg-quantile",
        policy=RunningQuantile(),
        summary="sdvg that refuses the worst share of the latest drafts",
        source="as sdvg",
    ),
    Routing(
        name="sdvg-budget",
        policy=Budget(),
        summary="sdvg whose tau is moved until a share of the drafts is accepted",
        source="as sdvg",
    ),
    Routing(
        name="sdvg-capped",
        policy=Threshold(),
        longest_run=3,
        off_after=4,
        summary="sdvg with at most three drafts in a row, and none after four refusals",
        source="as sdvg",
    ),
    Routing(
        name="sdvg-refine",
        policy=Threshold(),
        refine=2,
        summary="sdvg whose refused drafts are noised, and finished by the large model's last steps",
        source="as sdvg, and Meng et al. 2021, SDEdit, arXiv 2108.01073",
    ),
    Routing(
        name="stride",
        policy=Stride(),
        summary="every third block by the large model, unseen: what a scorer must beat",
        source="StrideAR, a public model card",
    ),
    Routing(
        name="chance",
        policy=Chance(),
        summary="a share of the blocks by the small model, by coins: what a scorer must beat",
        source="the ablation of SDVG",
    ),
)

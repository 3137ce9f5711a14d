"""The presets of next-token models, each a few lines of data."""

from __future__ import annotations

from vargen.decoding.method import DEFAULT_METHOD
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.acceptance import (
    GroupedRule,
    NeighborhoodRule,
    PooledRule,
    exact,
    recursive_rejection,
    shared_noise,
    traversal,
)
from vargen.decoding.next_token.drafters import (
    Eagle,
    Jacobi,
    JacobiTree,
    LayerSkip,
    Lookup,
    Medusa,
    Recycle,
    Speculative,
    SpeculativeTree,
    Wavefront,
)
from vargen.decoding.next_token.trees.shapes import DynamicTree

NEXT_TOKEN_METHODS: tuple[Accelerator, ...] = (
    Accelerator(
        name=DEFAULT_METHOD,
        drafter=Jacobi(window="auto", coupling="gumbel"),
        acceptance=shared_noise,
        summary="the picture of ar, by gumbel where measured costs say that drafting pays, else token by token",
        source="as gumbel",
    ),
    Accelerator(
        name="ar",
        summary="one token a pass, in raster order: the sequential baseline",
        source="Sun et al. 2024, LlamaGen",
    ),
    Accelerator(
        name="sjd",
        drafter=Jacobi(window=16, coupling="independent"),
        acceptance=exact,
        summary="a window of drafts, redrawn from the last pass; p/q acceptance",
        source="Teng et al. 2024, arXiv 2410.01699",
    ),
    Accelerator(
        name="scd",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=exact,
        summary="sjd whose drafts survive by maximal coupling",
        source="SCD 2025, arXiv 2510.24211",
    ),
    Accelerator(
        name="gumbel",
        drafter=Jacobi(window=16, coupling="gumbel"),
        acceptance=shared_noise,
        summary="the same picture as ar for the same seed, in fewer passes",
        source="SCD 2025, arXiv 2510.24211, with shared-noise acceptance",
    ),
    Accelerator(
        name="gsd",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=GroupedRule(),
        summary="scd that judges a draft by the mass of a group around it",
        source="So et al. 2025, arXiv 2508.07747",
    ),
    Accelerator(
        name="lantern-jacobi",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=NeighborhoodRule(),
        summary="scd that judges a draft by the mass of the tokens that look like it",
        source="Jang et al. 2024, LANTERN, arXiv 2410.03355, and Park et al. 2025, LANTERN++, arXiv 2502.06352",
    ),
    Accelerator(
        name="mulo-exact",
        drafter=Jacobi(window=32, coupling="maximal", initial="low-res"),
        acceptance=exact,
        summary="scd whose first drafts come from a low-resolution picture",
        source="MuLo-SD 2026, arXiv 2601.05149, with p/q acceptance",
    ),
    Accelerator(
        name="mulo",
        drafter=Jacobi(window=32, coupling="judged", initial="low-res"),
        acceptance=PooledRule(size=100, radius=2),
        summary="drafts from a low-resolution picture, kept where they look like what is likely, repaired where not",
        source="MuLo-SD 2026, arXiv 2601.05149",
    ),
    Accelerator(
        name="wavefront",
        drafter=Wavefront(window=48, reach=4),
        acceptance=PooledRule(size=0, threshold=2.0),
        summary="rows begin once the row above is some columns ahead; what stands for the rest are drafts of the last pass",
        source="He et al. 2024, ZipAR, arXiv 2412.04062, on a Jacobi window",
    ),
    Accelerator(
        name="speculative",
        drafter=Speculative(),
        acceptance=exact,
        summary="a small model drafts a chain; p/q acceptance",
        source="Leviathan et al. 2023, arXiv 2211.17192",
    ),
    Accelerator(
        name="pac",
        drafter=JacobiTree("fan-24", coupling="maximal"),
        acceptance=recursive_rejection,
        summary="scd with two candidates at the two positions behind a refusal, as a tree",
        source="SJD-PAC 2026, arXiv 2603.18599",
    ),
    Accelerator(
        name="gumbel-tree",
        drafter=JacobiTree("fan-24", coupling="gumbel"),
        acceptance=shared_noise,
        summary="the same picture as ar: gumbel with the two candidates that the image's noise likes best",
        source="as gumbel, on a tree",
    ),
    Accelerator(
        name="speculative-tree",
        drafter=SpeculativeTree(DynamicTree(nodes=15, depth=4, children=4), drawing="sampled"),
        acceptance=traversal,
        summary="a small model draws a tree for each picture and pass; judged from its leaves",
        source="Weng et al. 2025, arXiv 2505.12398, on trees as Li et al. 2024, EAGLE-2, ranks them",
    ),
    Accelerator(
        name="layer-skip",
        drafter=LayerSkip(),
        acceptance=exact,
        summary="the model drafts for itself, without some of its layers; p/q acceptance",
        source="Zhang et al. 2023, Draft & Verify, arXiv 2309.08168",
    ),
    Accelerator(
        name="lookup",
        drafter=Lookup(),
        acceptance=exact,
        summary="drafts what followed the same surroundings, in this picture and in stored ones; p/q acceptance",
        source="Saxena 2023, prompt lookup, and He et al. 2024, REST, arXiv 2311.08252, in two dimensions",
    ),
    Accelerator(
        name="recycle",
        drafter=Recycle(),
        acceptance=exact,
        summary="drafts what the model held likely behind the same token before; p/q acceptance",
        source="Luo et al. 2024, token recycling, arXiv 2408.08696",
    ),
    Accelerator(
        name="eagle",
        drafter=Eagle(DynamicTree(nodes=23, depth=8, children=3, frontier=3), drawing="sampled"),
        acceptance=traversal,
        summary="a trained layer grows a tree of drawn drafts; judged by whole paths",
        source="Li et al. 2024, arXiv 2401.15077 and 2406.16858, with traversal verification",
    ),
    Accelerator(
        name="eagle-same",
        drafter=Eagle(DynamicTree(nodes=23, depth=8, children=3, frontier=3), drawing="coupled"),
        acceptance=shared_noise,
        summary="the same picture as ar for the same seed, by a trained layer's tree that shares its noise",
        source="as eagle, with shared-noise acceptance",
    ),
    Accelerator(
        name="eagle-2",
        drafter=Eagle(DynamicTree(nodes=23, depth=5, children=8), drawing="best"),
        acceptance=recursive_rejection,
        summary="a trained layer proposes its likeliest tokens, undrawn; for comparison",
        source="Li et al. 2024, EAGLE-2, arXiv 2406.16858",
    ),
    Accelerator(
        name="lantern",
        drafter=Eagle(DynamicTree(nodes=23, depth=8, children=3, frontier=3), drawing="sampled"),
        acceptance=NeighborhoodRule(),
        summary="the tree of eagle, each draft judged by the mass of the tokens that look like it",
        source="Jang et al. 2024, LANTERN, arXiv 2410.03355, and Park et al. 2025, LANTERN++, arXiv 2502.06352",
    ),
    Accelerator(
        name="medusa",
        drafter=Medusa(DynamicTree(nodes=15, depth=3, children=3), drawing="sampled"),
        acceptance=traversal,
        summary="trained heads draft several tokens at once, as a tree; judged by whole paths",
        source="Cai et al. 2024, arXiv 2401.10774, with traversal verification",
    ),
)

"""The presets of next-token models, each a few lines of data."""

from __future__ import annotations

from vargen.decoding.jacobi import Jacobi
from vargen.decoding.method import DEFAULT_METHOD
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.acceptance import (
    GroupedRule,
    NeighborhoodRule,
    PooledRule,
    shared_noise,
    speculative_sampling,
    traversal,
)
from vargen.decoding.speculative import Speculative
from vargen.decoding.tree_drafters import Eagle, Medusa
from vargen.decoding.tree_growth import DynamicTree

NEXT_TOKEN_METHODS: tuple[Accelerator, ...] = (
    Accelerator(
        name=DEFAULT_METHOD,
        drafter=Jacobi(window="auto", coupling="gumbel"),
        acceptance=shared_noise,
        summary="the image of ar: gumbel where measured costs show that drafting pays off, otherwise one token per pass",
        source="as gumbel",
    ),
    Accelerator(
        name="ar",
        summary="one token per pass, in raster order: the sequential baseline",
        source="Sun et al. 2024, LlamaGen",
    ),
    Accelerator(
        name="sjd",
        drafter=Jacobi(window=16, coupling="independent"),
        acceptance=speculative_sampling,
        summary="a window of draft tokens, resampled from the last pass; p/q acceptance",
        source="Teng et al. 2024, arXiv 2410.01699",
    ),
    Accelerator(
        name="scd",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=speculative_sampling,
        summary="sjd that keeps draft tokens by maximal coupling",
        source="SCD 2025, arXiv 2510.24211",
    ),
    Accelerator(
        name="gumbel",
        drafter=Jacobi(window=16, coupling="gumbel"),
        acceptance=shared_noise,
        summary="the same image as ar for the same seed, in fewer passes",
        source="SCD 2025, arXiv 2510.24211, with shared-noise acceptance",
    ),
    Accelerator(
        name="gsd",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=GroupedRule(),
        summary="scd that accepts a draft token by the total probability of a group of tokens",
        source="So et al. 2025, arXiv 2508.07747",
    ),
    Accelerator(
        name="mulo-exact",
        drafter=Jacobi(window=32, coupling="maximal", initial="low-res"),
        acceptance=speculative_sampling,
        summary="scd whose first draft tokens come from a low-resolution image",
        source="MuLo-SD 2026, arXiv 2601.05149, with p/q acceptance",
    ),
    Accelerator(
        name="mulo",
        drafter=Jacobi(window=32, coupling="from-verdict", initial="low-res"),
        acceptance=PooledRule(size=100, radius=2),
        summary="drafts from a low-resolution image, accepted where similar tokens are probable, resampled elsewhere",
        source="MuLo-SD 2026, arXiv 2601.05149",
    ),
    Accelerator(
        name="speculative",
        drafter=Speculative(),
        acceptance=speculative_sampling,
        summary="a small model drafts a chain; p/q acceptance",
        source="Leviathan et al. 2023, arXiv 2211.17192",
    ),
    Accelerator(
        name="eagle",
        drafter=Eagle(DynamicTree(nodes=23, depth=8, children=3, frontier=3)),
        acceptance=traversal,
        summary="a trained layer drafts a tree by sampling, which is verified by whole paths",
        source="Li et al. 2024, arXiv 2401.15077 and 2406.16858, with traversal verification",
    ),
    Accelerator(
        name="lantern",
        drafter=Eagle(DynamicTree(nodes=23, depth=8, children=3, frontier=3)),
        acceptance=NeighborhoodRule(),
        summary="the tree of eagle, each draft token accepted by the total probability of similar tokens",
        source="Jang et al. 2024, LANTERN, arXiv 2410.03355, and Park et al. 2025, LANTERN++, arXiv 2502.06352",
    ),
    Accelerator(
        name="medusa",
        drafter=Medusa(DynamicTree(nodes=15, depth=3, children=3)),
        acceptance=traversal,
        summary="trained heads draft several tokens at once, as a tree, which is verified by whole paths",
        source="Cai et al. 2024, arXiv 2401.10774, with traversal verification",
    ),
)

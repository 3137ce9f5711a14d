"""Methods that are published and lose here, or are of interest only for comparison, each a file over the public interface.

They are written in plain torch. Those that are exact are verified by summation, the others with their relaxation summed.
"""

from functools import partial

from vargen.decoding.experimental.eagle_children import EagleSharedNoise, EagleTopK
from vargen.decoding.experimental.earlier_tokens import Lookup, Recycle
from vargen.decoding.experimental.jacobi_tree import JacobiTree
from vargen.decoding.experimental.layer_skip import LayerSkip
from vargen.decoding.experimental.rules import MixtureRule, TypicalRule, k_seq, recursive_rejection
from vargen.decoding.experimental.small_model_tree import SampledTree as SampledTree
from vargen.decoding.experimental.small_model_tree import SpeculativeTree
from vargen.decoding.experimental.wavefront import Wavefront, WavefrontRule
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.methods import RULES, Accelerator, register_presets
from vargen.decoding.relaxed_rules import NeighborhoodRule
from vargen.decoding.rules import shared_noise, speculative_sampling
from vargen.decoding.tree_drafters import DynamicTree
from vargen.decoding.tree_rules import traversal

RULES.update({"recursive-rejection": recursive_rejection, "k-seq": k_seq, "typical": TypicalRule(), "mixture": MixtureRule()})
_preset = partial(Accelerator, experimental=True)
register_presets(
    _preset(
        name="lantern-jacobi",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=NeighborhoodRule(),
        summary="scd that accepts a draft token by the total probability of similar tokens",
        source="Jang et al. 2024, LANTERN, arXiv 2410.03355, and Park et al. 2025, LANTERN++, arXiv 2502.06352",
    ),
    _preset(
        name="diversed",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=MixtureRule(),
        summary="scd that verifies against a mixture of the target's and the draft's probabilities",
        source="DIVERSED 2026, arXiv 2604.07622, with a fixed weight",
    ),
    _preset(
        name="wavefront",
        drafter=Wavefront(window=48, reach=4),
        acceptance=WavefrontRule(),
        summary="starts a row once the row above is some columns ahead, with draft tokens in place of missing ones",
        source="He et al. 2024, ZipAR, arXiv 2412.04062, on a Jacobi window",
    ),
    _preset(
        name="pac",
        drafter=JacobiTree(coupling="maximal"),
        acceptance=recursive_rejection,
        summary="scd with two candidates at each of the two positions after a rejection, as a tree",
        source="SJD-PAC 2026, arXiv 2603.18599",
    ),
    _preset(
        name="gumbel-tree",
        drafter=JacobiTree(coupling="gumbel"),
        acceptance=shared_noise,
        summary="the same image as ar: gumbel with the two candidates that the image's noise favors most",
        source="as gumbel, on a tree",
    ),
    _preset(
        name="speculative-tree",
        drafter=SpeculativeTree(DynamicTree(nodes=15, depth=4, children=4)),
        acceptance=traversal,
        summary="a small model drafts a tree for each image and pass, which is verified from its leaves",
        source="Weng et al. 2025, arXiv 2505.12398, on trees as Li et al. 2024, EAGLE-2, ranks them",
    ),
    _preset(
        name="layer-skip",
        drafter=LayerSkip(),
        acceptance=speculative_sampling,
        summary="the model drafts for itself, skipping some of its layers; p/q acceptance",
        source="Zhang et al. 2023, Draft & Verify, arXiv 2309.08168",
    ),
    _preset(
        name="lookup",
        drafter=Lookup(),
        acceptance=speculative_sampling,
        summary="drafts what followed the same context earlier in the image; p/q acceptance",
        source="Saxena 2023, prompt lookup, in two dimensions",
    ),
    _preset(
        name="recycle",
        drafter=Recycle(),
        acceptance=speculative_sampling,
        summary="drafts what the model predicted after the same token before; p/q acceptance",
        source="Luo et al. 2024, token recycling, arXiv 2408.08696",
    ),
    _preset(
        name="eagle-gumbel",
        drafter=EagleSharedNoise(DynamicTree(nodes=23, depth=8, children=3, frontier=3)),
        acceptance=shared_noise,
        summary="the same image as ar for the same seed, by a trained layer's tree that shares the image's noise",
        source="as eagle, with shared-noise acceptance",
    ),
    _preset(
        name="eagle-2",
        drafter=EagleTopK(DynamicTree(nodes=23, depth=5, children=8)),
        acceptance=recursive_rejection,
        summary="a trained layer proposes its most probable tokens without sampling; for comparison",
        source="Li et al. 2024, EAGLE-2, arXiv 2406.16858",
    ),
)

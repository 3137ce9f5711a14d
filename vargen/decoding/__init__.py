"""Algorithms: loops, and the parts that methods are composed of. Knows no concrete model, file or prompt."""

from vargen.decoding.accelerator import Accelerator
from vargen.decoding.acceptance import (
    Grouped,
    Neighbourhood,
    Pooled,
    Ratio,
    Relaxed,
    Typical,
    acceptance_rule,
    exact,
    k_seq,
    recursive_rejection,
    shared_noise,
    traversal,
)
from vargen.decoding.aggregators import LowerQuantile, last, lowest, mean
from vargen.decoding.block_pixels import BlockDecoder
from vargen.decoding.block_protocols import BlockModel
from vargen.decoding.block_score import View
from vargen.decoding.block_stats import BlockRow, BlockStats
from vargen.decoding.block_stream import Block, BlockStream, NonFiniteLatentsError
from vargen.decoding.blocks import decode_blocks
from vargen.decoding.commits import Eager, Lazy, Window
from vargen.decoding.draft import Draft, Output, Step, Tree, Verdict
from vargen.decoding.draft_length import Adaptive, Auto, Fixed
from vargen.decoding.drafters import (
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
from vargen.decoding.feature_protocols import FeatureHeads, FeatureModel
from vargen.decoding.methods import methods_of, resolve_accelerator
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.placements import Chance, Replay, Stride, Unscored
from vargen.decoding.policies import Budget, RelativeToFirst, RunningQuantile, Threshold
from vargen.decoding.presets import DEFAULT, PRESETS, Method
from vargen.decoding.protocols import AcceptanceRule, Drafter, TokenModel
from vargen.decoding.routing import Routing
from vargen.decoding.run import Decoded, NonFiniteLogitsError, Progress
from vargen.decoding.sampling import Sampling
from vargen.decoding.scale_images import LEFT_OUT
from vargen.decoding.scale_protocols import ScaleModel
from vargen.decoding.scales import decode_scales
from vargen.decoding.schedule import Schedule, Stage
from vargen.decoding.stats import DecodeStats
from vargen.decoding.tokens import decode
from vargen.decoding.trees import AutoTree, DynamicTree, StaticTree

__all__ = [
    "DEFAULT",
    "LEFT_OUT",
    "PRESETS",
    "Accelerator",
    "AcceptanceRule",
    "Adaptive",
    "Auto",
    "AutoTree",
    "Block",
    "BlockDecoder",
    "BlockModel",
    "BlockRow",
    "BlockStats",
    "BlockStream",
    "Budget",
    "Chance",
    "DecodeStats",
    "Decoded",
    "Draft",
    "Drafter",
    "DynamicTree",
    "Eager",
    "Eagle",
    "FeatureHeads",
    "FeatureModel",
    "Fixed",
    "Grouped",
    "Jacobi",
    "JacobiTree",
    "LayerSkip",
    "Lazy",
    "Lookup",
    "LowerQuantile",
    "Medusa",
    "Method",
    "Neighbourhood",
    "Noise",
    "NonFiniteLatentsError",
    "NonFiniteLogitsError",
    "Output",
    "Pooled",
    "Progress",
    "Purpose",
    "Ratio",
    "Recycle",
    "RelativeToFirst",
    "Relaxed",
    "Replay",
    "Routing",
    "RunningQuantile",
    "Sampling",
    "ScaleModel",
    "Schedule",
    "Speculative",
    "SpeculativeTree",
    "Stage",
    "StaticTree",
    "Step",
    "Stride",
    "Threshold",
    "TokenModel",
    "Tree",
    "Typical",
    "Unscored",
    "Verdict",
    "View",
    "Wavefront",
    "Window",
    "acceptance_rule",
    "decode",
    "decode_blocks",
    "decode_scales",
    "exact",
    "k_seq",
    "last",
    "lowest",
    "mean",
    "methods_of",
    "recursive_rejection",
    "resolve_accelerator",
    "shared_noise",
    "traversal",
]

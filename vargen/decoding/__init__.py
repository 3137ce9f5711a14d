"""Algorithms: loops, and the parts that methods are composed of. Knows no concrete model, file or prompt."""

# Importing these registers the presets.
import vargen.decoding.next_scale.presets
import vargen.decoding.next_token.presets
import vargen.decoding.video.presets  # noqa: F401
from vargen.decoding.harness import Decoded, NonFiniteLogitsError, Progress
from vargen.decoding.method import DEFAULT_METHOD, PRESETS, Method, list_methods, resolve_method
from vargen.decoding.next_scale.loop import decode_scales
from vargen.decoding.next_scale.protocols import ScaleModel
from vargen.decoding.next_scale.schedule import Schedule, Stage
from vargen.decoding.next_scale.state import LEFT_OUT
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.acceptance import (
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
from vargen.decoding.next_token.draft import Draft, Output, Step, Tree, Verdict
from vargen.decoding.next_token.draft_length import Adaptive, Auto, Fixed
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
from vargen.decoding.next_token.loop import decode
from vargen.decoding.next_token.protocols import AcceptanceRule, Drafter, FeatureHeads, FeatureModel, TokenModel
from vargen.decoding.next_token.trees.shapes import AutoTree, DynamicTree, StaticTree
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import Sampling
from vargen.decoding.stats import DecodeStats
from vargen.decoding.video.denoising import Eager, Lazy, Window
from vargen.decoding.video.loop import Block, BlockStream, NonFiniteLatentsError, decode_blocks
from vargen.decoding.video.method import Routing
from vargen.decoding.video.policies import Budget, Chance, RelativeToFirst, Replay, RunningQuantile, Stride, Threshold, Unscored
from vargen.decoding.video.protocols import BlockModel
from vargen.decoding.video.scoring import BlockDecoder, LowerQuantile, View, last, lowest, mean
from vargen.decoding.video.stats import BlockRow, BlockStats

__all__ = [
    "DEFAULT_METHOD",
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
    "list_methods",
    "lowest",
    "mean",
    "recursive_rejection",
    "resolve_method",
    "shared_noise",
    "traversal",
]

"""Decoding algorithms: loops and the parts that methods consist of. Independent of concrete models, files and prompts."""

from vargen.decoding.harness import DecodeOutput, NonFiniteLogitsError, Progress
from vargen.decoding.interfaces import AcceptanceRule, AutoregressiveHead, Drafter, ParallelHeads, TokenModel
from vargen.decoding.method import DEFAULT_METHOD, Method
from vargen.decoding.next_scale.loop import decode_scales
from vargen.decoding.next_scale.protocols import ScaleModel
from vargen.decoding.next_scale.schedule import ScaleSchedule, Stage
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.acceptance import (
    GroupedRule,
    NeighborhoodRule,
    PooledRule,
    RelaxedRule,
    TypicalRule,
    acceptance_rule,
    k_seq,
    recursive_rejection,
    shared_noise,
    speculative_sampling,
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
from vargen.decoding.next_token.drafters.base import ChainDrafter, TreeDrafter
from vargen.decoding.next_token.engine import Engine, FinishedImage
from vargen.decoding.next_token.loop import decode
from vargen.decoding.next_token.trees.shapes import DynamicTree, StaticTree
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.presets import PRESETS, list_methods, resolve_method
from vargen.decoding.sampling import Sampling
from vargen.decoding.stats import DecodeStats
from vargen.decoding.tree import Draft, Output, Step, Tree, Verdict
from vargen.decoding.video.loop import BlockStream, NonFiniteLatentsError, decode_video
from vargen.decoding.video.method import VideoMethod
from vargen.decoding.video.policies import SingleModel, Stride, Threshold
from vargen.decoding.video.protocols import BlockModel
from vargen.decoding.video.request import VideoBlock
from vargen.decoding.video.routing import DraftView, LearnedRouting
from vargen.decoding.video.scoring import BlockDecoder, BlockView
from vargen.decoding.video.stats import BlockRecord, VideoStats
from vargen.decoding.window import AutoWindow, FixedWindow

__all__ = [
    "DEFAULT_METHOD",
    "PRESETS",
    "Accelerator",
    "AcceptanceRule",
    "AutoWindow",
    "AutoregressiveHead",
    "BlockDecoder",
    "BlockModel",
    "BlockRecord",
    "BlockStream",
    "BlockView",
    "ChainDrafter",
    "DecodeOutput",
    "DecodeStats",
    "Draft",
    "DraftView",
    "Drafter",
    "DynamicTree",
    "Eagle",
    "Engine",
    "FinishedImage",
    "FixedWindow",
    "GroupedRule",
    "Jacobi",
    "JacobiTree",
    "LayerSkip",
    "LearnedRouting",
    "Lookup",
    "Medusa",
    "Method",
    "NeighborhoodRule",
    "Noise",
    "NonFiniteLatentsError",
    "NonFiniteLogitsError",
    "Output",
    "ParallelHeads",
    "PooledRule",
    "Progress",
    "Purpose",
    "Recycle",
    "RelaxedRule",
    "Sampling",
    "ScaleModel",
    "ScaleSchedule",
    "SingleModel",
    "Speculative",
    "SpeculativeTree",
    "Stage",
    "StaticTree",
    "Step",
    "Stride",
    "Threshold",
    "TokenModel",
    "Tree",
    "TreeDrafter",
    "TypicalRule",
    "Verdict",
    "VideoBlock",
    "VideoMethod",
    "VideoStats",
    "Wavefront",
    "acceptance_rule",
    "decode",
    "decode_scales",
    "decode_video",
    "k_seq",
    "list_methods",
    "recursive_rejection",
    "resolve_method",
    "shared_noise",
    "speculative_sampling",
    "traversal",
]

"""Decoding algorithms: loops and the parts that methods consist of. Independent of concrete models, files and prompts."""

from vargen.decoding import experimental as experimental  # registers its presets
from vargen.decoding.decode import decode
from vargen.decoding.engine import Engine
from vargen.decoding.interfaces import (
    AcceptanceRule,
    AutoregressiveHead,
    Drafter,
    LowResModel,
    ParallelHeads,
    ScaleModel,
    TokenModel,
)
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.methods import DEFAULT_METHOD, PRESETS, Accelerator, Method, list_methods, register_presets, resolve_method
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.relaxed_rules import GroupedRule, NeighborhoodRule, PooledRule, RelaxedRule
from vargen.decoding.requests import DecodeOutput, FinishedImage, NonFiniteLogitsError, Progress
from vargen.decoding.rules import acceptance_rule, shared_noise, speculative_sampling
from vargen.decoding.sampling import Sampling
from vargen.decoding.scales import ScaleSchedule, Stage, decode_scales
from vargen.decoding.speculative import ChainDrafter, Speculative
from vargen.decoding.stats import DecodeStats
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, PassResult, Tree, Verdict
from vargen.decoding.tree_drafters import Children, DynamicTree, Eagle, Medusa, TreeDrafter
from vargen.decoding.tree_rules import traversal
from vargen.decoding.video.interfaces import BlockDecoder, BlockModel, BlockView, DraftView, VideoBlock
from vargen.decoding.video.loop import BlockStream, NonFiniteLatentsError, decode_video
from vargen.decoding.video.policies import LearnedRouting, SingleModel, Stride, Threshold, VideoMethod
from vargen.decoding.video.stats import BlockRecord, VideoStats

# By subject, as on their page: calls and results, models, methods, drafters, rules, scales, video.
__all__ = [
    "decode", "Engine", "Sampling", "DecodeOutput", "FinishedImage", "Progress", "DecodeStats", "NonFiniteLogitsError",
    "TokenModel", "TokenState", "Output", "AutoregressiveHead", "ParallelHeads", "LowResModel", "Noise", "Purpose",
    "DEFAULT_METHOD", "PRESETS", "Accelerator", "Method", "list_methods", "register_presets", "resolve_method",
    "Drafter", "Jacobi", "ChainDrafter", "Speculative", "TreeDrafter", "DynamicTree", "Children", "Eagle", "Medusa",
    "AcceptanceRule", "Draft", "Tree", "PassResult", "Verdict", "acceptance_rule", "shared_noise", "speculative_sampling",
    "traversal", "RelaxedRule", "GroupedRule", "NeighborhoodRule", "PooledRule",
    "decode_scales", "ScaleModel", "ScaleSchedule", "Stage",
    "decode_video", "BlockStream", "BlockModel", "BlockDecoder", "BlockView", "DraftView", "VideoBlock", "VideoMethod",
    "SingleModel", "Stride", "Threshold", "LearnedRouting", "BlockRecord", "VideoStats", "NonFiniteLatentsError",
]  # fmt: skip

"""Algorithms: one loop, and the parts that methods are composed of. Knows no concrete model, file or prompt."""

from vargen.decoding.accelerator import PRESETS, Accelerator, resolve_accelerator
from vargen.decoding.acceptance import same_noise
from vargen.decoding.loop import NonFiniteLogitsError, decode
from vargen.decoding.stats import DecodeStats
from vargen.decoding.types import Decoded, Draft, Progress, Sampling, TokenModel, Tree, Verdict

__all__ = [
    "PRESETS",
    "Accelerator",
    "DecodeStats",
    "Decoded",
    "Draft",
    "NonFiniteLogitsError",
    "Progress",
    "Sampling",
    "TokenModel",
    "Tree",
    "Verdict",
    "decode",
    "resolve_accelerator",
    "same_noise",
]

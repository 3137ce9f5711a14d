"""Algorithms: one loop, and the parts that methods are composed of. Knows no concrete model, file or prompt."""

from vargen.decoding.accelerator import DEFAULT, PRESETS, Accelerator, resolve_accelerator
from vargen.decoding.acceptance import Grouped, acceptance_rule, exact, same_noise
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.loop import NonFiniteLogitsError, decode
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.speculative import Speculative
from vargen.decoding.stats import DecodeStats
from vargen.decoding.types import Decoded, Draft, Progress, Sampling, TokenModel, Tree, Verdict

__all__ = [
    "DEFAULT",
    "PRESETS",
    "Accelerator",
    "DecodeStats",
    "Decoded",
    "Draft",
    "Grouped",
    "Jacobi",
    "Noise",
    "NonFiniteLogitsError",
    "Progress",
    "Purpose",
    "Sampling",
    "Speculative",
    "TokenModel",
    "Tree",
    "Verdict",
    "acceptance_rule",
    "decode",
    "exact",
    "resolve_accelerator",
    "same_noise",
]

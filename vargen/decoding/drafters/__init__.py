"""Drafters: who proposes tokens, and with which probabilities."""

from vargen.decoding.drafters.eagle import Eagle
from vargen.decoding.drafters.jacobi import Jacobi
from vargen.decoding.drafters.jacobi_tree import JacobiTree
from vargen.decoding.drafters.layer_skip import LayerSkip, best_layers
from vargen.decoding.drafters.lookup import Lookup
from vargen.decoding.drafters.medusa import Medusa
from vargen.decoding.drafters.recycle import Recycle
from vargen.decoding.drafters.sequential import Sequential
from vargen.decoding.drafters.small_model import Speculative
from vargen.decoding.drafters.small_tree import SpeculativeTree
from vargen.decoding.drafters.wavefront import Wavefront

__all__ = [
    "Eagle",
    "Jacobi",
    "JacobiTree",
    "LayerSkip",
    "Lookup",
    "Medusa",
    "Recycle",
    "Sequential",
    "Speculative",
    "SpeculativeTree",
    "Wavefront",
    "best_layers",
]

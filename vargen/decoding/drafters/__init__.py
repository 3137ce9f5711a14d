"""Drafters: who proposes tokens, and with which probabilities."""

from vargen.decoding.drafters.jacobi import Jacobi
from vargen.decoding.drafters.layer_skip import LayerSkip, best_layers
from vargen.decoding.drafters.lookup import Lookup
from vargen.decoding.drafters.recycle import Recycle
from vargen.decoding.drafters.sequential import Sequential
from vargen.decoding.drafters.small_model import Speculative

__all__ = ["Jacobi", "LayerSkip", "Lookup", "Recycle", "Sequential", "Speculative", "best_layers"]

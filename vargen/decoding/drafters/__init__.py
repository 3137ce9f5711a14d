"""Drafters: who proposes tokens, and with which probabilities."""

from vargen.decoding.drafters.jacobi import Jacobi
from vargen.decoding.drafters.jacobi_tree import JacobiTree
from vargen.decoding.drafters.sequential import Sequential
from vargen.decoding.drafters.small_model import Speculative
from vargen.decoding.drafters.small_tree import SpeculativeTree

__all__ = ["Jacobi", "JacobiTree", "Sequential", "Speculative", "SpeculativeTree"]

"""Drafters: who proposes tokens, and with which probabilities."""

from vargen.decoding.drafters.eagle import EagleChain
from vargen.decoding.drafters.jacobi import Jacobi
from vargen.decoding.drafters.medusa import MedusaChain
from vargen.decoding.drafters.sequential import Sequential
from vargen.decoding.drafters.small_model import Speculative

__all__ = ["EagleChain", "Jacobi", "MedusaChain", "Sequential", "Speculative"]

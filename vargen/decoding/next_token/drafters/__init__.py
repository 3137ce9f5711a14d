"""Drafters, which propose tokens together with their probabilities."""

from vargen.decoding.next_token.drafters.base import ChainDrafter, Sequential, TreeDrafter
from vargen.decoding.next_token.drafters.draft_model import LayerSkip, Speculative
from vargen.decoding.next_token.drafters.draft_model_tree import SpeculativeTree
from vargen.decoding.next_token.drafters.eagle import Eagle
from vargen.decoding.next_token.drafters.jacobi import Jacobi
from vargen.decoding.next_token.drafters.jacobi_tree import JacobiTree
from vargen.decoding.next_token.drafters.lookup import Lookup
from vargen.decoding.next_token.drafters.medusa import Medusa
from vargen.decoding.next_token.drafters.recycle import Recycle
from vargen.decoding.next_token.drafters.wavefront import Wavefront

__all__ = [
    "ChainDrafter",
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
    "TreeDrafter",
    "Wavefront",
]

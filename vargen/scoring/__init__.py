"""Image and video rewards behind one interface."""

from vargen.scoring.protocol import (
    BatchedScorer,
    FunctionScorer,
    NonFiniteScoreError,
    Scorer,
    as_scorer,
    checked_scores,
)
from vargen.scoring.registry import SCORERS, open_scorer

__all__ = [
    "SCORERS",
    "BatchedScorer",
    "FunctionScorer",
    "NonFiniteScoreError",
    "Scorer",
    "as_scorer",
    "checked_scores",
    "open_scorer",
]

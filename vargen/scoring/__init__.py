"""Image and video reward models behind one interface."""

from vargen.scoring.protocol import BatchedScorer, FunctionScorer, NonFiniteScoreError, Scorer, score_images, to_scorer
from vargen.scoring.registry import SCORERS, open_scorer

__all__ = [
    "SCORERS",
    "BatchedScorer",
    "FunctionScorer",
    "NonFiniteScoreError",
    "Scorer",
    "open_scorer",
    "score_images",
    "to_scorer",
]

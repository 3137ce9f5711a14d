"""Several candidates of each picture, of which a scorer keeps the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import DecodeOutput
from vargen.pipelines.checks import MAX_IMAGES, ImageSeeds
from vargen.scoring.protocol import Scorer, score_images, to_scorer
from vargen.values import parse_int, short_repr


@dataclass(frozen=True)
class CandidateSelection:
    """How many candidates of each picture to draw, and what chooses among them; see `pipe(num_candidates=, scorer=)`."""

    count: int = 1
    scorer: Scorer | None = None

    @classmethod
    def checked(cls, num_candidates: Any, scorer: Any, named: Callable[[str], Scorer]) -> CandidateSelection:
        """Of a call's arguments.

        Args:
            named: opens a scorer by name.

        Raises:
            ValueError: for a count that is none, several candidates without a scorer, or an unknown scorer.
            TypeError: for a scorer that is neither a name, a `Scorer` nor a function.
        """
        count = parse_int(num_candidates, 1)
        if count is None:
            raise ValueError(f"num_candidates must be a whole number of at least 1, got {short_repr(num_candidates)}")
        if scorer is None and count > 1:
            raise ValueError(f"scorer must be given to choose among {count} candidates: a name, a Scorer or f(images, prompts)")
        if scorer is None:
            return cls(count)
        return cls(count, named(scorer) if isinstance(scorer, str) else to_scorer(scorer))

    def check_images(self, images: int) -> None:
        """Raise ValueError if a call of so many pictures would draw too many candidates."""
        if images * self.count > MAX_IMAGES:
            raise ValueError(
                f"one call draws at most {MAX_IMAGES} images, got {images} x {self.count} candidates (num_candidates)"
            )

    def choose(self, result: DecodeOutput, seeds: ImageSeeds, pictures: Tensor, texts: Sequence[str]) -> DecodeOutput:
        """The best candidate of each picture; all scores and seeds go into the statistics.

        Args:
            result: of all candidates, those of a picture together. pictures: float `[N, 3, Y, X]` in [0, 1], of the same.
            texts: prompts of the pictures, without repetition.

        Returns:
            The result with its chosen rows alone.

        Raises:
            NonFiniteScoreError: for a score that is no number.
        """
        assert self.scorer is not None
        prompts = [text for text in texts for _ in range(self.count)]
        scores = score_images(self.scorer, pictures.float().cpu(), prompts).view(-1, self.count)
        best = scores.argmax(1) if self.scorer.higher_is_better else scores.argmin(1)
        chosen = torch.arange(len(best)) * self.count + best
        stats, rows = result.stats, chosen.to(result.tokens.device)
        stats.scorer, stats.scores = self.scorer.name, scores.tolist()
        asked = seeds.asked
        stats.candidate_seeds = [asked[i : i + self.count] for i in range(0, len(asked), self.count)]
        stats.seeds = [asked[i] for i in chosen.tolist()]
        canvas = None if result.canvas is None else result.canvas[rows]
        return DecodeOutput(result.tokens[rows], result.length[rows], stats, result.finished, canvas)

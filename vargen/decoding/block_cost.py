"""What a method for video should take, from what its parts cost: u a target's pass over a block, d the drafter's, v decoding a
block, p its preview, s scoring it.

Target alone, with `steps` steps and a clean pass: (steps + 1) u + v a block. With drafts of which a share a stands:
(steps + 1) d + v + s + (1 - a) ((steps + 1) u + v) + c a u, where c is 1 if the target sees accepted blocks, and 0 if
it never does (`Window`, or behind its last block). So drafting pays only above the acceptance at which the two are equal.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from vargen.decoding.block_stats import BlockRow, BlockStats


@dataclass(frozen=True)
class BlockCosts:
    """Seconds, each of one block.

    Attributes:
        target, draft: a pass over one. decode: by the full decoder. preview: by the preview decoder, None where drafts are
            decoded in full. score: all frames of a block.
    """

    target: float
    draft: float
    decode: float
    score: float = 0.0
    preview: float | None = None

    def predicted(self, stats: BlockStats, scored: bool) -> float:
        """Seconds of a video, from its passes and verdicts alone.

        Args:
            scored: whether the method scores drafts.
        """
        return sum(self._row(row, scored) for row in stats.blocks)

    def _row(self, row: BlockRow, scored: bool) -> float:
        passes = row.fed.get("target", 0) * self.target + row.fed.get("draft", 0) * self.draft
        looked = scored and row.verdict in ("accepted", "rejected")
        seconds = passes + self.decode + (self.score if looked else 0.0)
        if self.preview is not None:
            return seconds + (self.preview if scored else 0.0)  # of every block: a scorer sees the frame before
        return seconds + (self.decode if looked and row.verdict == "rejected" else 0.0)

    def drafted_block(self, steps: int, acceptance: float, seen: float = 1.0) -> float:
        """Seconds of a block that is drafted and scored, in the mean.

        Args:
            steps: of both models. acceptance: share of drafts that stand. seen: c above.
        """
        fixed = (steps + 1) * self.draft + self.decode + self.score + (self.preview or 0.0)
        return fixed + (1 - acceptance) * self._redrawn(steps) + acceptance * seen * self.target

    def _redrawn(self, steps: int) -> float:
        """Seconds that a refusal costs."""
        return (steps + 1) * self.target + (self.decode if self.preview is None else 0.0)

    def target_block(self, steps: int) -> float:
        """Seconds of a block by the target alone."""
        return (steps + 1) * self.target + self.decode

    def break_even(self, steps: int, seen: float = 1.0) -> float:
        """The acceptance above which drafting pays; above 1 where it never does."""
        none, all_ = self.drafted_block(steps, 0.0, seen), self.drafted_block(steps, 1.0, seen)
        return (none - self.target_block(steps)) / (none - all_)


def measured_costs(target: Iterable[BlockStats], draft: Iterable[BlockStats], routed: Iterable[BlockStats]) -> BlockCosts:
    """Costs from videos by the target alone, by the drafter alone, and by a method that scores all drafts and accepts none.

    Each is a median over blocks, so that one that was interrupted does not count. Seconds by part must be known: on CUDA, of
    profiled runs.

    Raises:
        ValueError: where videos of one kind are missing.
    """
    own, small, both = list(target), list(draft), list(routed)
    decode = _median(row.seconds_by_part.get("decode", 0.0) for run in own for row in run.blocks)
    judged = [row for run in both for row in run.blocks if row.verdict == "rejected"]
    looks = _median(row.seconds_by_part.get("decode", 0.0) for row in judged)
    return BlockCosts(
        target=_median(_pass_seconds(row, "target") for run in own for row in run.blocks),
        draft=_median(_pass_seconds(row, "draft") for run in small for row in run.blocks),
        decode=decode,
        score=_median(row.seconds_by_part.get("score", 0.0) for row in judged),
        preview=None if looks > 1.6 * decode else max(0.0, looks - decode),
    )


def _pass_seconds(row: BlockRow, who: str) -> float:
    spent = row.seconds_by_part.get(who, 0.0) + row.seconds_by_part.get("commit", 0.0)
    return spent / max(1, row.fed.get(who, 0))


def _median(values: Iterable[float]) -> float:
    found = list(values)
    if not found:
        raise ValueError("costs need videos of the target, of the drafter, and of drafts that were scored and refused")
    return statistics.median(found)

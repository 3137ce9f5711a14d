"""Statistics of a run of the block loop: a record for each block, and totals."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

MAKERS = ("target", "draft", "refined")
Maker = Literal["target", "draft", "refined"]
Verdict = Literal["accepted", "rejected", "forced", "undrafted"]


@dataclass
class BlockRecord:
    """Record of one block of a video.

    Attributes:
        number: from 0.
        seed: of the video; with `number` it determines the noise of the block.
        maker: source of the latents: the target, the draft, or the draft refined by the target.
        verdict: outcome of the draft: accepted or rejected; forced if the target had to generate the block; undrafted if the
            policy, or a series of rejections, skipped drafting.
        score: of the draft (or of the target's block if that was scored); None if nothing was scored.
        scores: by frame.
        tau: the threshold it was compared with; None if there was none.
        passes: by model, `target` and `draft`, including cache updates.
        fed: number of blocks fed by these passes.
        seconds: of the block.
        seconds_by_part: draft, decode, score, target, commit; on CUDA only when profiled.
        note: why a draft was rejected without verification: an error of the scorer or the drafter.
    """

    number: int
    seed: int
    maker: Maker = "target"
    verdict: Verdict = "forced"
    score: float | None = None
    scores: list[float] = field(default_factory=list)
    tau: float | None = None
    passes: dict[str, int] = field(default_factory=dict)
    fed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinite numbers: an infinite `tau` becomes a string."""
        tau = self.tau if self.tau is None or abs(self.tau) < float("inf") else str(self.tau)
        return {**asdict(self), "tau": tau}


@dataclass
class VideoStats:
    """Statistics of one video.

    Attributes:
        accelerator: name of the method.
        seed: of the video.
        blocks: a record for each finished block.
        seconds: wall-clock time of generating the blocks, excluding the caller's time between them.
        stopped: whether a callback ended the run early.
        threads: number of CPU threads.
    """

    accelerator: str
    seed: int
    blocks: list[BlockRecord] = field(default_factory=list)
    seconds: float = 0.0
    stopped: bool = False
    threads: int = 1

    @property
    def makers(self) -> tuple[Maker, ...]:
        """Source of each block; see `Replay`."""
        return tuple(row.maker for row in self.blocks)

    @property
    def acceptance(self) -> float | None:
        """Fraction of drafts that were accepted; None if there were none."""
        judged = [row.verdict == "accepted" for row in self.blocks if row.verdict in ("accepted", "rejected")]
        return sum(judged) / len(judged) if judged else None

    @property
    def passes(self) -> dict[str, int]:
        """Number of passes by model."""
        return dict(sum((Counter(row.passes) for row in self.blocks), Counter()))

    @property
    def seconds_by_part(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for row in self.blocks:
            found.update(row.seconds_by_part)
        return dict(found)

    @property
    def failures(self) -> list[str]:
        """Errors of drafts and scores, by block; the target generated these blocks."""
        return [f"block {row.number}: {row.note}" for row in self.blocks if row.note]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        sums = {"acceptance": self.acceptance, "passes": self.passes, "seconds_by_part": self.seconds_by_part}
        rows = [row.to_dict() for row in self.blocks]
        return {**{k: v for k, v in vars(self).items() if k != "blocks"}, **sums, "failures": self.failures, "blocks": rows}


def mean_acceptance(runs: Sequence[VideoStats]) -> float | None:
    """Acceptance rate over all drafts of several videos."""
    return VideoStats("", 0, [row for run in runs for row in run.blocks]).acceptance


@dataclass(frozen=True)
class BlockCosts:
    """Costs in seconds, each per block.

    Attributes:
        target, draft: one pass over a block.
        decode: full decoder.
        preview: preview decoder; None if drafts are decoded in full.
        score: all frames of a block.
    """

    target: float
    draft: float
    decode: float
    score: float = 0.0
    preview: float | None = None

    def predicted(self, stats: VideoStats, scored: bool) -> float:
        """Predict the seconds of a video from its passes and verdicts alone.

        Args:
            scored: whether the method scores drafts.
        """
        return sum(self._row(row, scored) for row in stats.blocks)

    def _row(self, row: BlockRecord, scored: bool) -> float:
        passes = row.fed.get("target", 0) * self.target + row.fed.get("draft", 0) * self.draft
        looked = scored and row.verdict in ("accepted", "rejected")
        seconds = passes + self.decode + (self.score if looked else 0.0)
        if self.preview is not None:
            return seconds + (self.preview if scored else 0.0)  # for every block: the scorer also gets the previous frame
        return seconds + (self.decode if looked and row.verdict == "rejected" else 0.0)

    def drafted_block(self, steps: int, acceptance: float, seen: float = 1.0) -> float:
        """Expected seconds of a block that is drafted and scored.

        Args:
            steps: denoising steps of both models.
            acceptance: fraction of drafts that are accepted.
            seen: target passes per accepted draft, for the cache update.
        """
        fixed = (steps + 1) * self.draft + self.decode + self.score + (self.preview or 0.0)
        return fixed + (1 - acceptance) * self._redrawn(steps) + acceptance * seen * self.target

    def _redrawn(self, steps: int) -> float:
        """Extra seconds of a rejection."""
        return (steps + 1) * self.target + (self.decode if self.preview is None else 0.0)

    def target_block(self, steps: int) -> float:
        """Seconds of a block generated by the target alone."""
        return (steps + 1) * self.target + self.decode

    def break_even_acceptance(self, steps: int, seen: float = 1.0) -> float:
        """Acceptance rate above which drafting pays off; above 1 if it never does."""
        none, all_ = self.drafted_block(steps, 0.0, seen), self.drafted_block(steps, 1.0, seen)
        return (none - self.target_block(steps)) / (none - all_)


def estimate_block_costs(target: Iterable[VideoStats], draft: Iterable[VideoStats], routed: Iterable[VideoStats]) -> BlockCosts:
    """Estimate costs from videos of the target alone, of the drafter alone, and of a method that scores and rejects all drafts.

    Each cost is a median over blocks, so a single interrupted block has no effect. Seconds by part must be known: on CUDA, use
    profiled runs.

    Raises:
        ValueError: if one kind of video is missing.
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


def _pass_seconds(row: BlockRecord, who: str) -> float:
    spent = row.seconds_by_part.get(who, 0.0) + row.seconds_by_part.get("commit", 0.0)
    return spent / max(1, row.fed.get(who, 0))


def _median(values: Iterable[float]) -> float:
    found = list(values)
    if not found:
        raise ValueError("costs need videos of the target, of the drafter, and of drafts that were scored and refused")
    return statistics.median(found)

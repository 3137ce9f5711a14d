"""Statistics of a run of the block loop: a record for each block, and totals."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

BlockSource = Literal["target", "draft"]
BlockOutcome = Literal["accepted", "rejected", "forced", "undrafted"]


@dataclass
class BlockRecord:
    """Record of one block of a video.

    Attributes:
        number: from 0.
        seed: of the video; with `number` it determines the noise of the block.
        source: of the latents: the target, or the draft (of the small model, or an early estimate of the target).
        outcome: of the draft: accepted or rejected; forced if the target had to generate the block; undrafted if the
            policy skipped drafting.
        score: of the draft; None if nothing was scored.
        scores: by frame.
        tau: the threshold it was compared with; None if there was none.
        passes: by model, `target` and `draft`, including cache updates.
        blocks_fed: number of blocks fed by these passes, by model.
        seconds: of the block.
        seconds_by_part: draft, decode, score, target, commit; on CUDA only when profiled.
        failure: why a draft was rejected without verification: an error of the scorer or the drafter.
    """

    number: int
    seed: int
    source: BlockSource = "target"
    outcome: BlockOutcome = "forced"
    score: float | None = None
    scores: list[float] = field(default_factory=list)
    tau: float | None = None
    passes: dict[str, int] = field(default_factory=dict)
    blocks_fed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

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
    def sources(self) -> tuple[BlockSource, ...]:
        """Source of each block."""
        return tuple(record.source for record in self.blocks)

    @property
    def acceptance(self) -> float | None:
        """Fraction of drafts that were accepted; None if there were none."""
        accepted = [record.outcome == "accepted" for record in self.blocks if record.outcome in ("accepted", "rejected")]
        return sum(accepted) / len(accepted) if accepted else None

    @property
    def passes(self) -> dict[str, int]:
        """Number of passes by model."""
        return dict(sum((Counter(record.passes) for record in self.blocks), Counter()))

    @property
    def seconds_by_part(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for record in self.blocks:
            found.update(record.seconds_by_part)
        return dict(found)

    @property
    def failures(self) -> list[str]:
        """Errors of drafts and scores, by block; the target generated these blocks."""
        return [f"block {record.number}: {record.failure}" for record in self.blocks if record.failure]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        sums = {"acceptance": self.acceptance, "passes": self.passes, "seconds_by_part": self.seconds_by_part}
        records = [record.to_dict() for record in self.blocks]
        return {**{k: v for k, v in vars(self).items() if k != "blocks"}, **sums, "failures": self.failures, "blocks": records}


def mean_acceptance(runs: Sequence[VideoStats]) -> float | None:
    """Acceptance rate over all drafts of several videos."""
    return VideoStats("", 0, [record for run in runs for record in run.blocks]).acceptance


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

    def predict_seconds(self, stats: VideoStats, scored: bool) -> float:
        """Predict the seconds of a video from its passes and outcomes alone.

        Args:
            scored: whether the method scores drafts.
        """
        return sum(self._record_seconds(record, scored) for record in stats.blocks)

    def _record_seconds(self, record: BlockRecord, scored: bool) -> float:
        passes = record.blocks_fed.get("target", 0) * self.target + record.blocks_fed.get("draft", 0) * self.draft
        draft_scored = scored and record.outcome in ("accepted", "rejected")
        seconds = passes + self.decode + (self.score if draft_scored else 0.0)
        if self.preview is not None:
            return seconds + (self.preview if scored else 0.0)  # for every block: the scorer also gets the previous frame
        return seconds + (self.decode if draft_scored and record.outcome == "rejected" else 0.0)

    def drafted_block_seconds(self, steps: int, acceptance: float, update_passes: float = 1.0) -> float:
        """Expected seconds of a block that is drafted and scored.

        Args:
            steps: denoising steps of both models.
            acceptance: fraction of drafts that are accepted.
            update_passes: target passes per accepted draft, for the cache update.
        """
        fixed = (steps + 1) * self.draft + self.decode + self.score + (self.preview or 0.0)
        return fixed + (1 - acceptance) * self._rejection_seconds(steps) + acceptance * update_passes * self.target

    def _rejection_seconds(self, steps: int) -> float:
        """Extra seconds of a rejection."""
        return (steps + 1) * self.target + (self.decode if self.preview is None else 0.0)

    def target_block_seconds(self, steps: int) -> float:
        """Seconds of a block generated by the target alone."""
        return (steps + 1) * self.target + self.decode

    def break_even_acceptance(self, steps: int, update_passes: float = 1.0) -> float:
        """Acceptance rate above which drafting pays off; above 1 if it never does."""
        none, all_ = (self.drafted_block_seconds(steps, acceptance, update_passes) for acceptance in (0.0, 1.0))
        return (none - self.target_block_seconds(steps)) / (none - all_)


def estimate_block_costs(target: Iterable[VideoStats], draft: Iterable[VideoStats], scored: Iterable[VideoStats]) -> BlockCosts:
    """Estimate costs from videos of the target alone, of the drafter alone, and of methods that score drafts and reject some.

    Each cost is a median over blocks, so a single interrupted block has no effect. Seconds by part must be known: on CUDA, use
    profiled runs.

    Raises:
        ValueError: if one kind of video is missing.
    """
    alone, small = list(target), list(draft)
    decode = _require_median(record.seconds_by_part.get("decode", 0.0) for run in alone for record in run.blocks)
    rejected = [record for run in scored for record in run.blocks if record.outcome == "rejected"]
    decode_twice = _require_median(record.seconds_by_part.get("decode", 0.0) for record in rejected)
    return BlockCosts(
        target=_require_median(_pass_seconds(record, "target") for run in alone for record in run.blocks),
        draft=_require_median(_pass_seconds(record, "draft") for run in small for record in run.blocks),
        decode=decode,
        score=_require_median(record.seconds_by_part.get("score", 0.0) for record in rejected),
        preview=None if decode_twice > 1.6 * decode else max(0.0, decode_twice - decode),
    )


def _pass_seconds(record: BlockRecord, model: str) -> float:
    seconds = record.seconds_by_part.get(model, 0.0) + record.seconds_by_part.get("commit", 0.0)
    return seconds / max(1, record.blocks_fed.get(model, 0))


def _require_median(values: Iterable[float]) -> float:
    found = list(values)
    if not found:
        raise ValueError("costs need videos of the target, of the drafter, and of drafts that were scored and rejected")
    return statistics.median(found)

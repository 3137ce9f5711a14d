"""Statistics of a run of the block loop: a record for each block, and totals."""

from __future__ import annotations

from collections import Counter
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
        seconds: wall-clock time of the start image, if there is one, and of the blocks, without the caller's between them.
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
        """Seconds of all blocks by part; see `BlockRecord`."""
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

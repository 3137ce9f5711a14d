"""What a run of the block loop did: a row for each block, and the sums."""

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
    """One block of a video.

    Attributes:
        number: from 0. seed: of the video; with `number` it is all that the block's noise depends on.
        maker: whose latents stand: the target's, the draft's, or the draft's refined by the target.
        verdict: on the draft: accepted, rejected; forced where the target had to draw it, undrafted where the policy, or a
            series of rejections, left no draft.
        score: of the draft (of the target's block where that was scored), None where nothing was. scores: by frame.
        tau: the threshold that it was compared with, None where there was none.
        passes: by model, `target` and `draft`, clean passes included. fed: blocks that these passes fed.
        seconds: of the block. seconds_by_part: draft, decode, score, target, commit; on CUDA only when profiled.
        note: why a draft was refused unjudged: what a scorer, or the drafter, got wrong.
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
        """Plain values, for JSON, which has no infinite numbers: such a `tau` is text."""
        tau = self.tau if self.tau is None or abs(self.tau) < float("inf") else str(self.tau)
        return {**asdict(self), "tau": tau}


@dataclass
class VideoStats:
    """Numbers of one video.

    Attributes:
        accelerator: name of the method. seed: of the video. blocks: a row each, those that were finished.
        seconds: wall-clock of making the blocks; what the caller does between them does not count.
        stopped: whether a callback ended it early. threads: of the CPU.
    """

    accelerator: str
    seed: int
    blocks: list[BlockRecord] = field(default_factory=list)
    seconds: float = 0.0
    stopped: bool = False
    threads: int = 1

    @property
    def makers(self) -> tuple[Maker, ...]:
        """By block; see `Replay`."""
        return tuple(row.maker for row in self.blocks)

    @property
    def acceptance(self) -> float | None:
        """Share of the drafts that were accepted; None without any."""
        judged = [row.verdict == "accepted" for row in self.blocks if row.verdict in ("accepted", "rejected")]
        return sum(judged) / len(judged) if judged else None

    @property
    def passes(self) -> dict[str, int]:
        """By model."""
        return dict(sum((Counter(row.passes) for row in self.blocks), Counter()))

    @property
    def seconds_by_part(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for row in self.blocks:
            found.update(row.seconds_by_part)
        return dict(found)

    @property
    def failures(self) -> list[str]:
        """What went wrong with drafts and scores, by block; the target made these blocks."""
        return [f"block {row.number}: {row.note}" for row in self.blocks if row.note]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        sums = {"acceptance": self.acceptance, "passes": self.passes, "seconds_by_part": self.seconds_by_part}
        rows = [row.to_dict() for row in self.blocks]
        return {**{k: v for k, v in vars(self).items() if k != "blocks"}, **sums, "failures": self.failures, "blocks": rows}


def mean_acceptance(runs: Sequence[VideoStats]) -> float | None:
    """Over several videos, of all their drafts."""
    return VideoStats("", 0, [row for run in runs for row in run.blocks]).acceptance


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

    def predicted(self, stats: VideoStats, scored: bool) -> float:
        """Seconds of a video, from its passes and verdicts alone.

        Args:
            scored: whether the method scores drafts.
        """
        return sum(self._row(row, scored) for row in stats.blocks)

    def _row(self, row: BlockRecord, scored: bool) -> float:
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

    def break_even_acceptance(self, steps: int, seen: float = 1.0) -> float:
        """The acceptance above which drafting pays; above 1 where it never does."""
        none, all_ = self.drafted_block(steps, 0.0, seen), self.drafted_block(steps, 1.0, seen)
        return (none - self.target_block(steps)) / (none - all_)


def estimate_block_costs(target: Iterable[VideoStats], draft: Iterable[VideoStats], routed: Iterable[VideoStats]) -> BlockCosts:
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


def _pass_seconds(row: BlockRecord, who: str) -> float:
    spent = row.seconds_by_part.get(who, 0.0) + row.seconds_by_part.get("commit", 0.0)
    return spent / max(1, row.fed.get(who, 0))


def _median(values: Iterable[float]) -> float:
    found = list(values)
    if not found:
        raise ValueError("costs need videos of the target, of the drafter, and of drafts that were scored and refused")
    return statistics.median(found)

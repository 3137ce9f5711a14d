"""What a run of the block loop did: a row for each block, and the sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

MAKERS = ("target", "draft", "refined")
Maker = Literal["target", "draft", "refined"]
Verdict = Literal["accepted", "rejected", "forced", "undrafted"]


@dataclass
class BlockRow:
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
class BlockStats:
    """Numbers of one video.

    Attributes:
        accelerator: name of the method. seed: of the video. blocks: a row each, those that were finished.
        seconds: wall-clock of making the blocks; what the caller does between them does not count.
        stopped: whether a callback ended it early. threads: of the CPU.
    """

    accelerator: str
    seed: int
    blocks: list[BlockRow] = field(default_factory=list)
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


def mean_acceptance(runs: Sequence[BlockStats]) -> float | None:
    """Over several videos, of all their drafts."""
    return BlockStats("", 0, [row for run in runs for row in run.blocks]).acceptance

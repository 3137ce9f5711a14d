"""Statistics of a run of the decoding loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass
class DecodeStats:
    """Statistics of one `decode` call.

    Attributes:
        accelerator: name of the preset.
        images: batch size B.
        tokens: number of tokens committed, over all images.
        passes: number of target passes (function evaluations), including the prefill.
        seconds: wall-clock time of the loop, including the prefill.
        committed_histogram: entry `[k]` counts (pass, image) pairs that committed k tokens (index 0 is unused; the prefill
            commits 1).
        passes_by_width: `{T: passes}`, number of passes that fed T tokens to each image, excluding the prefill.
        scorer, scores, candidate_seeds: set if a scorer selected the images: its name, and for each image the scores and seeds
            of all candidates. `images` and `tokens` then count the candidates, and `seeds` are those of the selected images.
        draft_passes_by_width: like `passes_by_width`, for passes of the draft model of next-scale models.
        by_scale: for next-scale models, per scale: number of tokens, the model that generated it, passes that generated it, and
            their seconds.
        relaxation: per image, acceptance probability spent beyond the exact rule, summed; zeros for exact rules.
        seconds_by_part: prefill, draft, target, accept, commit. On CUDA only with `profile=True`, which synchronizes.
        seeds: per image, the seed that reproduces it: the one passed to `decode`, or in a pipeline call that of a generator.
        stopped: whether a callback ended the run early.
        threads: number of CPU threads that passes used.
        forced: number of `tokens` that were the only possible ones at their positions, such as ends of rows.
    """

    accelerator: str
    images: int
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    committed_histogram: list[int] = field(default_factory=list)
    passes_by_width: dict[int, int] = field(default_factory=dict)
    relaxation: list[float] = field(default_factory=list)
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    stopped: bool = False
    threads: int = 1
    scorer: str | None = None
    scores: list[list[float]] = field(default_factory=list)
    candidate_seeds: list[list[int]] = field(default_factory=list)
    draft_passes_by_width: dict[int, int] = field(default_factory=dict)
    by_scale: list[dict[str, Any]] = field(default_factory=list)
    forced: int = 0

    @staticmethod
    def merge(runs: Sequence[DecodeStats]) -> DecodeStats:
        """Combine the statistics of consecutive runs into one: counts are summed, and lists by image joined."""
        columns = zip_longest(*(run.committed_histogram for run in runs), fillvalue=0)
        merged: dict[str, Any] = {
            "accelerator": runs[0].accelerator,
            "scorer": runs[0].scorer,
            "stopped": any(run.stopped for run in runs),
            "threads": max(run.threads for run in runs),
            "committed_histogram": [sum(column) for column in columns],
            "by_scale": [
                {**scales[0], **{name: sum(scale[name] for scale in scales) for name in ("passes", "seconds")}}
                for scales in zip(*(run.by_scale for run in runs), strict=True)
            ],
        }
        for name in (each.name for each in fields(DecodeStats) if each.name not in merged):
            values = [getattr(run, name) for run in runs]
            is_count = isinstance(values[0], dict)
            merged[name] = dict(sum(map(Counter, values), Counter())) if is_count else sum(values, type(values[0])())
        return DecodeStats(**merged)

    def __str__(self) -> str:
        """One line: passes, tokens per pass, seconds, and the first seeds."""
        seeds = ", ".join(map(str, self.seeds[:4])) + ", ..." * (len(self.seeds) > 4)
        rate = f"{self.tokens_per_pass:.1f} tokens per pass, {self.seconds:.1f} s"
        return f"{self.passes} passes, {rate}, seed{'s' if len(self.seeds) > 1 else ''} {seeds}"

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all images per second of the loop; 0 if nothing was measured."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that a pass committed per unfinished image, without forced ones, which cost no decision."""
        turns = sum(self.committed_histogram)
        return (self.tokens - self.forced) / turns if turns else 0.0

    @property
    def relaxation_per_token(self) -> float:
        """Acceptance probability spent beyond the exact rule, per token; 0 for exact rules."""
        return sum(self.relaxation) / self.tokens if self.tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, whose keys are strings."""
        by_width = ("passes_by_width", "draft_passes_by_width")
        rates = ("tokens_per_second", "tokens_per_pass", "relaxation_per_token")
        return {
            **asdict(self),
            **{name: {str(width): passes for width, passes in getattr(self, name).items()} for name in by_width},
            **{name: getattr(self, name) for name in rates},
        }

"""What a run of the decoding loop did, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass
class DecodeStats:
    """Numbers of one `decode` call.

    Attributes:
        accelerator: name of the preset.
        images: batch B.
        tokens: tokens committed, over all images.
        passes: target passes (number of function evaluations), the prefill included.
        seconds: wall-clock of the loop, prefill included.
        accepted_histogram: `[k]` passes times images that committed k tokens (index 0 is unused; the prefill commits 1).
        fed: `{T: passes}`, how many passes fed T tokens to each image, the prefill left out.
        siblings: of methods that draft trees, by sibling rank `[offered, accepted]`: how often an accepted slot had a sibling
            of this rank behind it, and how often that was the accepted one.
        scorer, scores, candidate_seeds: where a scorer chose: its name, and for each picture the scores and seeds of all its
            candidates; `images` and `tokens` count these, and `seeds` are those of the chosen.
        draft_fed: the same of the smaller model's passes, of next-scale models.
        by_scale: of next-scale models, for each scale its tokens, the model that drew it, the passes that fed it, in how many
            images it was drafted and how often that was kept, and the seconds of the passes that began with it.
        relaxation: per image, acceptance granted minus exact acceptance, summed; zeros for exact rules.
        seconds_by_part: prefill, draft, target, accept, commit. On CUDA only with `profile=True`, which synchronises.
        seeds: per image, the one that draws it again: as passed to `decode`; of a pipeline's call, that of a generator.
        stopped: whether a callback ended it early.
        threads: of the CPU, that passes ran on.
    """

    accelerator: str
    images: int
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    accepted_histogram: list[int] = field(default_factory=list)
    fed: dict[int, int] = field(default_factory=dict)
    relaxation: list[float] = field(default_factory=list)
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    stopped: bool = False
    threads: int = 1
    siblings: list[list[int]] = field(default_factory=list)
    scorer: str | None = None
    scores: list[list[float]] = field(default_factory=list)
    candidate_seeds: list[list[int]] = field(default_factory=list)
    draft_fed: dict[int, int] = field(default_factory=dict)
    by_scale: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def joined(runs: Sequence[DecodeStats]) -> DecodeStats:
        """Of several runs made one after the other, as one."""
        parts = sum((Counter(run.seconds_by_part) for run in runs), Counter())
        columns = zip_longest(*(run.accepted_histogram for run in runs), fillvalue=0)
        return DecodeStats(
            accelerator=runs[0].accelerator,
            images=sum(run.images for run in runs),
            tokens=sum(run.tokens for run in runs),
            passes=sum(run.passes for run in runs),
            seconds=sum(run.seconds for run in runs),
            accepted_histogram=[sum(column) for column in columns],
            fed=dict(sum((Counter(run.fed) for run in runs), Counter())),
            relaxation=[value for run in runs for value in run.relaxation],
            seconds_by_part=dict(parts),
            seeds=[seed for run in runs for seed in run.seeds],
            stopped=any(run.stopped for run in runs),
            threads=max(run.threads for run in runs),
            siblings=_sum_tables([run.siblings for run in runs]),
            scorer=runs[0].scorer,
            scores=[scores for run in runs for scores in run.scores],
            candidate_seeds=[seeds for run in runs for seeds in run.candidate_seeds],
            draft_fed=dict(sum((Counter(run.draft_fed) for run in runs), Counter())),
            by_scale=[_merge_scales(scales) for scales in zip(*(run.by_scale for run in runs), strict=True)],
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens that a pass committed per unfinished image."""
        turns = sum(self.accepted_histogram)
        return self.tokens / turns if turns else 0.0

    @property
    def sibling_rates(self) -> list[float]:
        """By rank, how often a sibling was the accepted one where there was one: what tells which tree to draft."""
        return [accepted / offered if offered else 0.0 for offered, accepted in self.siblings]

    @property
    def relaxation_per_token(self) -> float:
        """Acceptance granted beyond the exact rule, per token; 0 for exact rules."""
        return sum(self.relaxation) / self.tokens if self.tokens else 0.0

    def picture(self, number: int) -> dict[str, Any]:
        """What draws picture `number` again, and, where a scorer saw it, how it was scored.

        Returns:
            `seed`, and with a scorer `scorer` and `score`; of several candidates also `candidates`, the scores of all, and
            `asked_seed`, which drew the first.
        """
        if self.scorer is None:
            return {"seed": self.seeds[number]}
        scores, seeds = self.scores[number], self.candidate_seeds[number]
        several = {"candidates": scores, "asked_seed": seeds[0]} if len(scores) > 1 else {}
        score = scores[seeds.index(self.seeds[number])]
        return {"seed": self.seeds[number], "scorer": self.scorer, "score": score, **several}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, whose keys are text."""
        fed, drafted = ({str(width): passes for width, passes in each.items()} for each in (self.fed, self.draft_fed))
        rates: dict[str, Any] = {"tokens_per_second": self.tokens_per_second, "tokens_per_pass": self.tokens_per_pass}
        rates["sibling_rates"] = self.sibling_rates
        rates["relaxation_per_token"] = self.relaxation_per_token
        return {**asdict(self), "fed": fed, "draft_fed": drafted, **rates}


def _sum_tables(tables: list[list[list[int]]]) -> list[list[int]]:
    """Tables of like columns, row by row; some may have more rows."""
    rows = zip_longest(*tables, fillvalue=[0, 0])
    return [[sum(column) for column in zip(*row, strict=True)] for row in rows]


def _merge_scales(scales: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One scale of several runs."""
    counted = {name: sum(scale[name] for scale in scales) for name in ("passes", "drafted", "kept", "seconds")}
    return {**scales[0], **counted}

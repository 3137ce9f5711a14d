"""Exactness check: is what a method generates distributed as the target?

The models are tables (`TableModel`), small enough that passes can be summed exactly over all drafts and all outcomes of the
rule (`vargen.verify.exact_sum`): the total variation distance to the target is zero up to float32 rounding, or the method
is not exact. Methods with shared noise are compared with sequential decoding instead, token by token. Negative controls,
variants with known mistakes, are summed in the same way: a check that did not detect them would prove nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from vargen.decoding import (
    Accelerator,
    Eagle,
    Medusa,
    Method,
    Sampling,
    ScaleSchedule,
    VideoMethod,
    decode,
    decode_scales,
)
from vargen.decoding.sampling import to_probs
from vargen.verify.controls import CONTROLS, Control
from vargen.verify.exact_sum import PassSum, ReusedNoiseError, TooManyOutcomesError, sum_images, sum_pass
from vargen.verify.tables import ScaleTable, TableEagle, TableLowRes, TableMedusa, TableModel

TOLERANCE = 1e-6  # total variation distance of an exact method, from float32 probabilities
DETECTED = 1e-3  # distance at which a negative control counts as detected
CASE_DRAFTS = {"chain": 20_000, "tree": 4_000}  # of a case; an outcome of a tree costs ten times that of a chain
SEEDS = 3_000  # images of a case that are compared with sequential decoding


@dataclass(frozen=True)
class Case:
    """A table model and how its tokens are sampled.

    Attributes:
        tokens, rows: number of tokens of the grid, and its rows.
        guidance: s of u + s (c - u), with a second table as u. The draft model then is the table c.
        after: number of tokens committed before the pass, for drafters that sample every draft token again in every pass.
        forced: (position, token) pairs that have probability 1.
    """

    name: str
    tokens: int = 4
    rows: int = 1
    vocab: int = 3
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    guidance: float = 1.0
    after: int = 0
    forced: tuple[tuple[int, int], ...] = ()

    def model(self) -> TableModel:
        """Build the model, with another table as its draft model, and what its trained drafters need."""
        arguments: dict[str, Any] = {
            "vocab": self.vocab,
            "tokens": self.tokens,
            "rows": self.rows,
            "forced": dict(self.forced),
        }
        model, draft_model = TableModel(seed=4, **arguments), TableModel(seed=77, **arguments)
        if self.guidance != 1:
            draft_model = TableModel(seed=4, spread=0.8, **arguments)
            other = TableModel(seed=40, spread=0.8, **arguments)
            model.table = other.table + self.guidance * (draft_model.table - other.table)
        generator = torch.Generator().manual_seed(5)
        model.codebook = torch.randn(self.vocab, 4, generator=generator)  # for rules that use similarity of tokens
        model.draft_model = draft_model
        model.draft_heads = {Eagle.kind: TableEagle(draft_model), Medusa.kind: TableMedusa(draft_model)}
        model.low_res = TableLowRes(draft_model)
        return model


CASES = (
    Case("1 x 3", 3),
    Case("1 x 3, 5 codes, top-k 4, min-p 0.2", 3, vocab=5, sampling=Sampling(top_k=4, min_p=0.2)),
    Case("1 x 4, top-p 0.7, after 2 tokens", 4, sampling=Sampling(top_p=0.7), after=2),
    Case("1 x 4, 4 codes, temperature 0.7, top-k 2", 4, vocab=4, sampling=Sampling(0.7, 2)),
    Case("2 x 3, 2 codes, guidance 3", 6, 2, vocab=2, guidance=3.0),
    Case("3 x 2, guidance 2, temperature 1.3, top-k 2, top-p 0.8", 6, 3, sampling=Sampling(1.3, 2, 0.8), guidance=2.0, after=3),
    Case("1 x 5, certain tokens", 5, forced=((1, 2), (3, 0))),
)  # fmt: skip


@dataclass(frozen=True)
class ScaleCase:
    """A case of a next-scale model, whose `tokens` are its scales."""

    name: str
    tokens: int = 3
    vocab: int = 3
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    scale_tokens: tuple[int, ...] = (1, 2, 2)
    codes: tuple[int, ...] | None = None

    def model(self) -> ScaleTable:
        arguments: dict[str, Any] = {"vocab": self.vocab, "scale_tokens": self.scale_tokens, "codes": self.codes}
        model = ScaleTable(seed=4, **arguments)
        model.draft_model = ScaleTable(seed=77, **arguments)
        return model


SCALE_CASES = (
    ScaleCase("scales of 1, 2, 2 tokens"),
    ScaleCase("top-p 0.9, min-p 0.3", sampling=Sampling(top_p=0.9, min_p=0.3)),
    ScaleCase("temperature 0.7, top-k 2", sampling=Sampling(0.7, 2)),
    ScaleCase("scales of 1, 1, 2, 3 tokens, 2 codes", vocab=2, scale_tokens=(1, 1, 2, 3)),
    ScaleCase("fewer codes at coarse scales", codes=(2, 3, 3)),
)


@dataclass(frozen=True)
class Finding:
    """Result of one case.

    Attributes:
        distance: total variation distance between committed tokens and the target's distribution; for methods with shared
            noise, the fraction of images that differ from sequential decoding.
        draft_distance: total variation distance between draft tokens and their recorded q.
        relaxation: expected relaxation that the rule reported; None if the method reports none.
        drafts, outcomes: number of drafts that were summed, and of drafts times outcomes of the rule; for methods with shared
            noise, the number of images that were compared.
        passes: number of passes that were summed.
    """

    case: str
    distance: float
    draft_distance: float = 0.0
    relaxation: float | None = None
    drafts: int = 0
    outcomes: int = 0
    passes: int = 0

    @property
    def exact(self) -> bool:
        return max(self.distance, self.draft_distance) <= TOLERANCE

    @property
    def within_relaxation(self) -> bool:
        """Whether the distance is at most the relaxation that the rule reported, if it reports any."""
        if self.relaxation is None:
            return True
        return self.distance <= self.relaxation + TOLERANCE and self.draft_distance <= self.relaxation + TOLERANCE


@dataclass(frozen=True)
class Report:
    """Results of all cases of a method, and of the negative controls.

    Attributes:
        claims: `"exact"` or `"relaxed"`.
        proof: `"summed"` over drafts and outcomes, or `"compared"` with sequential decoding.
        controls: (mistake, source, distance) of each negative control.
    """

    name: str
    claims: Literal["exact", "relaxed"]
    proof: Literal["summed", "compared"]
    findings: tuple[Finding, ...]
    controls: tuple[tuple[str, str, float], ...]

    @property
    def exact(self) -> bool:
        return all(finding.exact for finding in self.findings)

    @property
    def keeps_its_claim(self) -> bool:
        """Whether the method is exact, or its distance is at most the relaxation it reports if it claims to be relaxed."""
        return self.exact or (self.claims == "relaxed" and all(each.within_relaxation for each in self.findings))

    @property
    def worst(self) -> float:
        """The largest distance of all cases."""
        return max(max(each.distance, each.draft_distance) for each in self.findings)

    @property
    def detects_controls(self) -> bool:
        """Whether the check detected every negative control; if not, its findings prove nothing."""
        return all(distance >= DETECTED for _, _, distance in self.controls)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            **dataclasses.asdict(self),
            "exact": self.exact,
            "worst": self.worst,
            "keeps_its_claim": self.keeps_its_claim,
            "detects_controls": self.detects_controls,
        }


def check_exactness(method: Method, max_drafts: int | None = None) -> Report:
    """Check whether a method samples the model's distribution in every case, and whether negative controls are detected.

    Args:
        method: windows, chains and trees are cut to the models' few tokens, the stages of a schedule to their scales.
        max_drafts: maximum number of drafts to sum per case. Default: `CASE_DRAFTS`.

    Raises:
        ValueError: table models cannot run the method.
        NotEnumerableError: a drafter or rule uses noise in a way that cannot be enumerated; says what it must do instead.
    """
    if isinstance(method, VideoMethod):
        raise ValueError(f"method {method.name!r} is for video: latents have no probabilities to sum")
    assert isinstance(method, Accelerator | ScaleSchedule)
    cases: tuple[Any, ...] = SCALE_CASES if isinstance(method, ScaleSchedule) else CASES
    compared = method.sequential_tokens
    findings = []
    for case in cases:
        finding = compare_with_sequential(method, case) if compared else sum_case(method, case, max_drafts)
        if finding is not None:
            findings.append(finding)
    topology = "scale" if isinstance(method, ScaleSchedule) else method.drafter.topology
    kinds = {"chain", "window"} if topology == "chain" else {topology}
    controls = tuple((each.mistake, each.source, sum_control(each)) for each in CONTROLS if each.kind in kinds)
    return Report(
        name=method.name,
        claims=method.kind,
        proof="compared" if compared else "summed",
        findings=tuple(findings),
        controls=controls,
    )


def fix_window(method: Any) -> Any:
    """Return the method with a fixed number of draft tokens."""
    drafter: Any = getattr(method, "drafter", None)
    is_auto = getattr(drafter, "window", 0) == "auto"
    return replace(method, drafter=replace(drafter, window=4)) if is_auto else method


def sum_case(method: Accelerator | ScaleSchedule, case: Case | ScaleCase, max_drafts: int | None = None) -> Finding | None:
    """Sum at most 3 passes, as many as the limit allows, after as few tokens as it allows; None if not even the last fits."""
    if isinstance(case, ScaleCase):
        assert isinstance(method, ScaleSchedule)
        return _make_finding(case.name, sum_images(method, case.model(), case.sampling))
    assert isinstance(method, Accelerator)
    model, fitted = case.model(), fix_window(method)
    likeliest = model.find_most_probable(0, lambda logits: to_probs(logits, case.sampling))
    independent = "independent-per-pass" in fitted.drafter.provides
    lengths = range(case.after, case.tokens) if independent else [0]
    limit = max_drafts or CASE_DRAFTS[method.drafter.topology]
    for length, passes in [(lengths[0], 3), (lengths[0], 2), *((length, 1) for length in lengths)]:
        prefix = likeliest[:length]
        try:
            found = sum_pass(fitted, model, prefix, case.sampling, passes=passes, max_drafts=limit)
            return _make_finding(case.name, found)
        except TooManyOutcomesError:
            continue
        except ReusedNoiseError:  # shared noise that is not compared: one pass can be summed, but not several jointly
            if passes == 1:
                raise
    return None


def _make_finding(name: str, found: PassSum) -> Finding:
    return Finding(
        name, found.distance, found.draft_distance, found.relaxation, found.most_drafts, found.outcomes, found.passes
    )


@cache
def sum_control(control: Control) -> float:
    """Return the distance of a negative control: of its committed tokens or its draft tokens, whichever is larger."""
    if isinstance(control.method, ScaleSchedule):
        case = SCALE_CASES[0]
        return sum_images(control.method, case.model(), control.sampling).distance
    small = CASES[0]
    model, sampling = small.model(), control.sampling
    target = (model, sampling)
    if control.change is not None:
        model, sampling = control.change(model, sampling), Sampling()
    found = sum_pass(fix_window(control.method), model, (), sampling, passes=control.passes, target=target)
    return max(found.distance, found.draft_distance)


def compare_with_sequential(method: Accelerator | ScaleSchedule, case: Case | ScaleCase, images: int = SEEDS) -> Finding:
    """Compare images with those of sequential decoding for the same seeds, token by token."""
    model, condition, seeds = case.model(), torch.zeros(images, dtype=torch.int64), torch.arange(images) + 10**6
    loop: Any = decode_scales if isinstance(case, ScaleCase) else decode
    baseline = "plain" if isinstance(case, ScaleCase) else "ar"
    tokens = loop(model, condition, seeds, fix_window(method), case.sampling).tokens
    expected = loop(model, condition, seeds, baseline, case.sampling).tokens
    different = float((tokens != expected).any(1).double().mean())
    return Finding(case.name, different, drafts=images, outcomes=images)

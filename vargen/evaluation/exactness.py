"""Exactness check: samples of a method on small models, compared with the enumerated probabilities of all sequences.

The models are tables (`TableModel`) small enough to enumerate every sequence. A method samples many sequences, and the total
variation distance between their frequencies and the true probabilities is compared with the noise floor: the distance expected
for the same number of independent samples. Negative controls, variants with known mistakes of released implementations, are
measured in the same way: a check that did not detect them would prove nothing.

Shape suffixes: V vocabulary, N tokens.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import (
    Accelerator,
    Draft,
    Eagle,
    Jacobi,
    Medusa,
    Method,
    Noise,
    Purpose,
    Sampling,
    ScaleSchedule,
    Stage,
    Verdict,
    VideoMethod,
    acceptance_rule,
    decode,
    decode_scales,
    speculative_sampling,
)
from vargen.decoding.next_scale.acceptance import scale_rule
from vargen.decoding.noise import sample_gumbel_max
from vargen.decoding.sampling import to_probs
from vargen.evaluation.known_wrong import REQUIRED_CONTROLS, WRONG_TREES
from vargen.evaluation.table_models import ScaleTable, TableEagle, TableLowRes, TableMedusa, TableModel

MOST_SPREADS = 4.0  # standard deviations above the noise floor; an exact method exceeds them in about 1 of 30,000 cases
CHAINS = 150_000
VOCAB = 3  # of the table models


@dataclass(frozen=True)
class Case:
    """A table model and the sampling settings of its tokens."""

    name: str
    tokens: int = 5
    rows: int = 1
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    forced: tuple[tuple[int, int], ...] = ()  # (position, token) pairs that have probability 1

    def model(self) -> TableModel:
        """Build the model, with another table as its draft model, and what its trained drafters need."""
        arguments: dict[str, Any] = {"vocab": VOCAB, "tokens": self.tokens, "rows": self.rows, "forced": dict(self.forced)}
        model = TableModel(seed=4, **arguments)
        generator = torch.Generator().manual_seed(5)
        model.codebook = torch.randn(3, 4, generator=generator)  # for rules that use similarity of tokens
        model.example_tokens = torch.randint(3, (12, self.tokens), generator=generator)  # for retrieval drafters
        model.draft_model = TableModel(seed=77, **arguments)
        model.draft_heads = {Eagle.kind: TableEagle(model.draft_model), Medusa.kind: TableMedusa(model.draft_model)}
        model.low_res = TableLowRes(model.draft_model)
        return model


CASES = (
    Case("plain softmax"),
    Case("three rows of two", tokens=6, rows=3),
    Case("top-p 0.7", sampling=Sampling(top_p=0.7)),
    Case("temperature 0.7, top-k 2", sampling=Sampling(0.7, 2)),
    Case("certain tokens", tokens=6, forced=((1, 2), (4, 0))),
)


@dataclass(frozen=True)
class ScaleCase:
    """A case of a next-scale model, whose `tokens` are its scales."""

    name: str
    tokens: int = 3
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    codes: tuple[int, ...] | None = None

    def model(self) -> ScaleTable:
        model = ScaleTable(seed=4, codes=self.codes)
        model.draft_model = ScaleTable(seed=77, codes=self.codes)
        return model


SCALE_CASES = (
    ScaleCase("plain softmax"),
    ScaleCase("top-p 0.7", sampling=Sampling(top_p=0.7)),
    ScaleCase("temperature 0.7, top-k 2", sampling=Sampling(0.7, 2)),
    ScaleCase("fewer codes at coarse scales", codes=(2, 3, 3)),
)


@dataclass(frozen=True)
class Finding:
    """Result of one case.

    Attributes:
        distance: total variation distance between sampled and true probabilities of all sequences.
        floor: expected distance for the same number of independent samples of the true probabilities.
        spread: standard deviation of that distance.
        impossible: fraction of sampled sequences that have probability 0.
    """

    case: str
    distance: float
    floor: float
    spread: float
    impossible: float

    @property
    def times_the_floor(self) -> float:
        return self.distance / self.floor

    @property
    def exact(self) -> bool:
        return self.distance < self.floor + MOST_SPREADS * self.spread and self.impossible == 0


@dataclass(frozen=True)
class Report:
    """Results of all cases of a method, and of the negative controls measured in the same run."""

    name: str
    claims: str  # "exact" or "relaxed"
    chains: int
    findings: tuple[Finding, ...]
    controls: tuple[Finding, ...]

    @property
    def exact(self) -> bool:
        return all(finding.exact for finding in self.findings)

    @property
    def can_tell(self) -> bool:
        """Whether the check detected every negative control; if not, its findings prove nothing."""
        return not any(control.exact for control in self.controls)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**dataclasses.asdict(self), "exact": self.exact, "can_tell": self.can_tell}


def measure(
    method: Method, model: TableModel | ScaleTable, sampling: Sampling, chains: int = CHAINS, case: str = ""
) -> Finding:
    """Sample `chains` sequences of a table model with a method, and compare their frequencies with the true probabilities."""
    loop: Any = decode_scales if isinstance(model, ScaleTable) else decode
    tokens = loop(model, torch.zeros(chains, dtype=torch.int64), torch.arange(chains) + 10**6, method, sampling).tokens
    V, N = model.vocab, tokens.shape[1]
    index = (tokens * V ** torch.arange(N - 1, -1, -1)).sum(1)
    frequencies = torch.bincount(index, minlength=V**N).double() / chains
    truth = model.joint(0, lambda logits: to_probs(logits, sampling)).flatten()
    # A frequency of n samples has error e = sqrt(p (1 - p) / n); |N(0, e)| has mean e sqrt(2 / pi), variance e^2 (1 - 2 / pi).
    error = (truth * (1 - truth) / chains).sqrt()
    floor, spread = error.sum() * math.sqrt(2 / math.pi) / 2, (error.square().sum() * (1 - 2 / math.pi)).sqrt() / 2
    distance = (frequencies - truth).abs().sum() / 2
    return Finding(case, float(distance), float(floor), float(spread), float(frequencies[truth == 0].sum()))


def check(accelerator: Method, chains: int = CHAINS) -> Report:
    """Check whether a method samples the model's distribution in every case, and whether negative controls are detected.

    Args:
        accelerator: windows and chains are cut to the models' five or six tokens, the stages of a schedule to three scales.
        chains: number of sequences sampled per case; fewer raise the noise floor, which hides small errors.

    Raises:
        ValueError: `chains` is below 1,000, or table models cannot run the method.
    """
    if chains < 1000:
        raise ValueError(f"chains must be at least 1000, got {chains}")
    if isinstance(accelerator, VideoMethod):
        raise ValueError(f"accelerator {accelerator.name!r} is for video: latents have no probabilities to enumerate")
    assert isinstance(accelerator, Accelerator | ScaleSchedule)
    cases: tuple[Case | ScaleCase, ...] = SCALE_CASES if isinstance(accelerator, ScaleSchedule) else CASES
    wrongs: dict[str, Any] = WRONG_SCALES if isinstance(accelerator, ScaleSchedule) else WRONG
    if isinstance(accelerator, Accelerator) and accelerator.topology == "tree":
        wrongs = {name: WRONG_TREES[name] for name in REQUIRED_CONTROLS}
    findings = [measure(_fitted(accelerator, case), case.model(), case.sampling, chains, case.name) for case in cases]
    first = cases[0]
    controls = [measure(wrong, first.model(), first.sampling, chains, name) for name, wrong in wrongs.items()]
    return Report(accelerator.name, accelerator.kind, chains, tuple(findings), tuple(controls))


def _fitted(method: Accelerator | ScaleSchedule, case: Case | ScaleCase) -> Method:
    """Return the method, cut to the size of the case's model."""
    return method.fit_to_grid(case.tokens, VOCAB) if isinstance(method, Accelerator) else method.fit_to_scales(case.tokens)


# -- negative controls --------------------------------------------------------------------------------------------------


@acceptance_rule(exact=True)
def refusal_from_p(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Lumina-mGPT 2.0: a rejected token is resampled from p instead of the residual."""
    verdict = speculative_sampling(probs, draft, noise, relaxation)
    row = probs[torch.arange(len(probs)), verdict.count - 1]
    return dataclasses.replace(verdict, next_token=noise.at(verdict.count - 1).sample(row[:, None], Purpose.RESIDUAL)[:, 0])


@acceptance_rule(exact=True)
def uniform_bonus(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """SJD-PAC as released: if the whole draft is accepted, a uniformly distributed token is committed."""
    verdict = speculative_sampling(probs, draft, noise, relaxation)
    uniform = torch.ones_like(probs[:, :1])
    tokens = sample_gumbel_max(uniform, noise.seeds, noise.position[:, :1], Purpose.CHOICE, noise.step)[:, 0]
    return dataclasses.replace(verdict, next_token=torch.where(verdict.count == probs.shape[1], tokens, verdict.next_token))


WRONG = {
    "rejected token resampled from p": Accelerator(drafter=Jacobi(4), acceptance=refusal_from_p),
    "uniform token after a full draft": Accelerator(drafter=Jacobi(2), acceptance=uniform_bonus),
}


@scale_rule(exact=True)
def resample_scale_from_target(p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """A rejected token is resampled from p instead of the residual."""
    at = draft[..., None]
    accepted = noise.uniform(Purpose.ACCEPT) * q.gather(2, at)[..., 0] < p.gather(2, at)[..., 0]
    return torch.where(accepted, draft, noise.sample(p, Purpose.RESIDUAL)), accepted.all(1)


@scale_rule(exact=True)
def majority_argmax(p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """lijrjyan/SDVAR: a scale is accepted if half of its tokens are the target's most probable ones."""
    kept = (p.argmax(-1) == draft).float().mean(1) >= 0.5
    return torch.where(kept[:, None], draft, noise.sample(p, Purpose.RESIDUAL)), kept


WRONG_SCALES = {
    "rejected tokens resampled from p": ScaleSchedule(stages=(Stage(num_drafted=2, rule=resample_scale_from_target),)),
    "accepted if half are the likeliest": ScaleSchedule(stages=(Stage(num_drafted=2, rule=majority_argmax),)),
}

"""The proof: every exact rule, drafter, and topology sums to the target's distribution; known-wrong variants do not.

Passes are summed over all drafts and all outcomes of the rule (`vargen.verify.exact_sum`). A few whole runs are sampled, as
a second, independent check.
"""

import dataclasses

import pytest
import torch
from combinations import COMBINATIONS, Combination, pairs, valid_combinations
from initial_drafts import MixtureJacobi
from one_step import Coins, random_probs
from sampled_images import sample_images

from vargen.decoding import (
    PRESETS,
    Accelerator,
    Draft,
    DynamicTree,
    Eagle,
    GroupedRule,
    Jacobi,
    Noise,
    PassResult,
    PooledRule,
    Sampling,
    Speculative,
    Tree,
    Verdict,
    decode,
    speculative_sampling,
    traversal,
)
from vargen.decoding.experimental import Recycle, Wavefront, WavefrontRule
from vargen.decoding.jacobi import couple_maximally
from vargen.decoding.noise import Purpose
from vargen.decoding.rules import acceptance_rule, gather_p_and_q, residual_weights, verify_chain
from vargen.verify.controls import CONTROLS
from vargen.verify.exact_sum import ReusedNoiseError, sum_pass
from vargen.verify.exactness import (
    CASES,
    DETECTED,
    SCALE_CASES,
    TOLERANCE,
    Case,
    check_exactness,
    compare_with_sequential,
    fix_window,
    sum_case,
    sum_control,
)
from vargen.verify.tables import TableModel

METHODS = [preset for preset in PRESETS.values() if preset.paradigm != "video"]
SMALL = Case("1 x 4", 4)


def distance(method: Accelerator, case: Case = SMALL, passes: int = 3) -> float:
    """The larger of the two distances of a method's first passes."""
    found = sum_pass(fix_window(method), case.model(), (), case.sampling, passes=passes)
    return max(found.distance, found.draft_distance)


SUMMED = [method for method in METHODS if method.paradigm != "next-scale" and not method.sequential_tokens]  # up to a limit


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_preset_keeps_its_claim(method) -> None:
    check_claim(method, 500, 3 if method in SUMMED else None)


@pytest.mark.slow
@pytest.mark.parametrize("method", SUMMED, ids=lambda method: method.name)
def test_every_preset_keeps_its_claim_in_every_case(method) -> None:
    check_claim(method, 3000)  # `vargen verify` sums more


def check_claim(method, max_drafts: int, at_least: int | None = None) -> None:
    """Check all cases, or those within the limit, of which there are at least so many."""
    report = check_exactness(method, max_drafts=max_drafts)
    assert report.keeps_its_claim and report.detects_controls, report
    assert report.exact == (method.kind == "exact") or method.name in ("wavefront", "economy")
    cases = SCALE_CASES if method.paradigm == "next-scale" else CASES
    assert len(report.findings) == len(cases) or len(report.findings) >= (at_least or len(cases))


def test_the_combinations_cover_every_pair() -> None:
    covered = set().union(*map(pairs, COMBINATIONS))
    assert covered == set().union(*map(pairs, valid_combinations())) and len(COMBINATIONS) < 100


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_combination_is_exact(combination: Combination) -> None:
    method = combination.method()
    case = combination.case
    if method.sequential_tokens:
        assert compare_with_sequential(method, case, 2000).exact
        return
    try:
        finding = sum_case(method, case, max_drafts=1000)
    except ReusedNoiseError:  # shared noise in drafts, with another rule
        assert sample_images(fix_window(method), case.model(), case.sampling, 30_000) > 1e-3
    else:
        assert finding is None or finding.exact, finding


@pytest.mark.parametrize("name", ["scd", "speculative-tree", "plain"])
def test_sampled_images_have_the_joint_distribution(name: str) -> None:
    method = PRESETS[name]
    case = SCALE_CASES[0] if method.paradigm == "next-scale" else CASES[0]
    assert sample_images(fix_window(method), case.model(), case.sampling, 30_000) > 1e-3


REPAIRS = {
    **{f"local repair, radius {radius}": (Jacobi(4, "from-verdict", "low-res"), PooledRule(1, 0.4, radius, budget=0.0))
       for radius in (0, 1, 2)},
    **{f"wavefront, reach {reach}": (Wavefront(6, reach=reach), WavefrontRule(budget=0.0)) for reach in (0, 1)},
}  # fmt: skip


@pytest.mark.parametrize("name", REPAIRS)
def test_relaxed_rules_without_a_budget_are_exact(name: str) -> None:
    drafter, rule = REPAIRS[name]
    assert distance(Accelerator(drafter=drafter, acceptance=rule), Case("3 x 2", 6, 3, vocab=2)) <= TOLERANCE


class ChangingWindow(MixtureJacobi):
    """Windows that become larger and smaller, through 1, where nothing is drafted."""

    def propose(self, state, noise, width):
        return super().propose(state, noise, {2: 2, 3: 1, 4: 3}.get(int(state.pass_number[0]), width))


@pytest.mark.parametrize("coupling", ["independent", "maximal"])
def test_changing_windows_are_exact(coupling):
    drafter = ChangingWindow(4, coupling)
    method = Accelerator(drafter=drafter, acceptance=speculative_sampling)
    model = SMALL.model()
    found = sum_pass(method, model, passes=4)
    assert max(found.distance, found.draft_distance) <= TOLERANCE


class ChangingChain(Speculative):
    """Chains of two draft tokens, one, one, then none."""

    def propose(self, state, noise, width):
        drafts = {2: 2, 3: 1, 4: 1}.get(int(state.pass_number[0]), 0)
        if not drafts:
            return Draft.make_empty(len(state.seeds), state.vocab, state.seeds.device)
        return Speculative.propose(self.copy(length=drafts, chain=Tree.make_chain(drafts)), state, noise, width)


def test_changing_chains_are_exact():
    assert distance(Accelerator(drafter=ChangingChain(2), acceptance=speculative_sampling)) <= TOLERANCE


# -- negative controls: the same check must fail ------------------------------------------------------------------------


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.mistake)
def test_the_check_fails_for_known_wrong_variants(control):
    assert sum_control(control) >= DETECTED


@acceptance_rule(exact=True)
def least_of_two(p, draft, noise, relaxation):
    """SJD at batch 2: every row commits as much as the row that accepted least; the surplus stays a draft (`surplus_tail`)."""
    verdict = speculative_sampling(p, draft, noise, relaxation)
    pairs = verdict.count.view(-1, 2)
    least = pairs.amin(1, keepdim=True).expand(-1, 2).reshape(-1)
    cut = draft.tokens.gather(1, (least - 1).clamp(max=draft.tokens.shape[1] - 1)[:, None])[:, 0]
    return dataclasses.replace(verdict, count=least, next_token=torch.where(verdict.count > least, cut, verdict.next_token))


def surplus(step):
    """Accepted draft tokens stay, the others are resampled, and all are recorded as sampled from p."""
    p, draft, noise = step.probs, step.draft, step.noise
    accepted = (
        (noise.uniform(Purpose.ACCEPT)[:, :-1] * gather_p_and_q(p, draft)[1] < gather_p_and_q(p, draft)[0]).cumprod(1).bool()
    )
    resample_rejected = noise.sample(p, Purpose.RESAMPLE)
    return torch.cat([torch.where(accepted, draft.tokens, resample_rejected[:, :-1]), resample_rejected[:, -1:]], dim=1)


@dataclasses.dataclass(frozen=True)
class EvenQ(Eagle):
    """Records the q of a drafter that would sample uniformly."""

    def propose(self, state, noise, width):
        draft = super().propose(state, noise, width)
        return dataclasses.replace(draft, probs=torch.full_like(draft.probs, 1 / 3))


class Overstated(Recycle):
    """Its drafts are recorded as sampled from something else."""

    def propose(self, state, noise, width):
        draft = super().propose(state, noise, width)
        return dataclasses.replace(draft, probs=draft.probs.roll(1, dims=-1) * 0.5 + 0.5 * draft.probs)


class RolledQ(Jacobi):
    """Initial drafts are recorded with the probabilities of other tokens."""

    def propose(self, state, noise, width):
        draft = super().propose(state, noise, width)
        return draft if state.pass_number[0] > 2 else dataclasses.replace(draft, probs=draft.probs.roll(1, -1))


class Spiky(Jacobi):
    """A uniform draft recorded as one-hot: exact, only slow (a control of the controls)."""

    def propose(self, state, noise, width):
        draft = super().propose(state, noise, width)
        if state.pass_number[0] > 2:
            return draft
        return dataclasses.replace(draft, probs=torch.zeros_like(draft.probs).scatter_(2, draft.tokens[..., None], 1.0))


@pytest.mark.parametrize(("drafter", "rule"), [
    (RolledQ(4, "maximal", "low-res"), speculative_sampling), (EvenQ(DynamicTree(3, 3, 1)), traversal),
    (EvenQ(DynamicTree(5, 2, 2)), traversal), (Overstated(4), speculative_sampling),
    (Jacobi(4, "maximal"), GroupedRule(size=2, delta=1.0)),
], ids=lambda part: getattr(part, "__name__", type(part).__name__))  # fmt: skip
def test_the_check_fails_for_a_wrong_q(drafter, rule):
    assert distance(Accelerator(drafter=drafter, acceptance=rule), CASES[0]) >= DETECTED


def test_the_check_passes_for_a_variant_that_only_looks_wrong():
    assert distance(Accelerator(drafter=Spiky(4), acceptance=speculative_sampling), passes=1) <= TOLERANCE


def test_samples_show_a_bias_that_depends_on_the_batch():
    """SJD at batch 2, which no single image shows."""
    method = Accelerator(drafter=Jacobi(4, surplus), acceptance=least_of_two)
    assert sample_images(method, SMALL.model(), Sampling(), 60_000) < 1e-3


# -- one step, summed exactly -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_step_of_the_maximal_coupling_keeps_the_probs_and_couples_best(deterministic):
    """Summed over the old draft and the coin, the new token follows p and equals the old one with probability 1 - TV."""
    p, q = random_probs(64, 6, True).unbind(1)
    B, V = p.shape
    if deterministic:
        q = torch.zeros_like(q).scatter_(1, torch.full((B, 1), 2), 1.0)
    total, agree = torch.zeros_like(p), torch.zeros(B, dtype=torch.float64)
    one = torch.ones(B, dtype=torch.int64)
    verdict = Verdict(path=torch.arange(2).expand(B, 2), count=one, next_token=one)  # in which a coupling has no say
    for d in range(V):
        draft = Draft(torch.full((B, 1), d), Tree.make_chain(1), None if deterministic else q[:, None])
        probability = torch.where(q[:, d] > 0, p[:, d] / q[:, d], 0.0).clamp(max=1)
        for coin, weight in ((probability * (1 - 1e-12), probability), (probability + 1e-12, 1 - probability)):
            uniforms = Coins(0.0, B, 2)
            uniforms.uniform = lambda purpose, coin=coin: coin[:, None].expand(B, 2)  # type: ignore[method-assign]
            result = PassResult(draft, p[:, None].expand(B, 2, V), None, verdict, uniforms, one)
            token = couple_maximally(result)[:, 0]
            left = uniforms.drawn_from[0][:, 0]
            resample_rejected = left / left.sum(-1, keepdim=True)
            kept = torch.nn.functional.one_hot(torch.full((B,), d), V).double()
            keeps = coin * q[:, d] < p[:, d]
            assert (token[keeps] == d).all()
            total += (q[:, d] * weight)[:, None] * torch.where(keeps[:, None], kept, resample_rejected)
            agree += q[:, d] * weight * keeps
    assert (total - p).abs().max() < 1e-10
    assert torch.allclose(agree, torch.minimum(p, q).sum(1), atol=1e-10)


def test_an_empty_residual_falls_back_to_the_target():
    p = torch.tensor([[0.25, 0.75, 0.0]])
    assert torch.equal(residual_weights(p, p), p)
    draft = Draft(torch.tensor([[1]]), Tree.make_chain(1), p[:, None])
    noise = Noise(torch.tensor([3]), torch.tensor([[0, 1]]))
    verdict = verify_chain(torch.tensor([[False]]), p[:, None].expand(1, 2, 3), draft, noise)
    assert verdict.next_token.item() in (0, 1)


@pytest.mark.parametrize("length", [1, 3])
def test_a_drafter_equal_to_the_target_is_always_accepted(length):
    model = TableModel(vocab=5, tokens=21, seed=2)
    twin = TableModel(vocab=5, tokens=21, seed=2)
    accelerator = Accelerator(drafter=Speculative(length, twin), acceptance=speculative_sampling)
    result = decode(model, torch.zeros(400, dtype=torch.int64), torch.arange(400), accelerator, Sampling(0.9, 4, 0.95))
    full = 20 // (length + 1)
    assert result.stats.committed_histogram[length + 1] == 400 * full
    assert sum(result.stats.committed_histogram[2:]) == 400 * (full + (20 % (length + 1) > 1))

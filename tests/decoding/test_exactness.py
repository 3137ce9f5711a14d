"""The proof: every exact rule, drafter, and topology sums to the target's distribution; known-wrong variants do not.

Passes are summed over all drafts and all outcomes of the rule (`vargen.verify.exact_sum`). A few whole runs are sampled, as
a second, independent check.
"""

import pytest
import torch
from combinations import COMBINATIONS, Combination
from initial_drafts import MixtureJacobi
from sampled_images import sample_images

from vargen.decoding import (
    PRESETS,
    Accelerator,
    Draft,
    Jacobi,
    Noise,
    PooledRule,
    Sampling,
    Speculative,
    Tree,
    decode,
    speculative_sampling,
)
from vargen.decoding.experimental import Wavefront, WavefrontRule
from vargen.decoding.rules import residual_weights, verify_chain
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
        assert sample_images(fix_window(method), case.model(), case.sampling, 5000) > 1e-3
    else:
        assert finding is None or finding.exact, finding


@pytest.mark.parametrize("images", [5000, pytest.param(30_000, marks=pytest.mark.extended)])
@pytest.mark.parametrize("name", ["ar", "scd", "speculative-tree", "plain"])
def test_sampled_images_have_the_joint_distribution(name: str, images: int) -> None:
    method = PRESETS[name]
    case = SCALE_CASES[0] if method.paradigm == "next-scale" else CASES[1]
    right, wrong = case.model(), case.model()
    assert sample_images(fix_window(method), right, case.sampling, images) > 1e-3
    for table in wrong.tables if method.paradigm == "next-scale" else [wrong.table]:
        table.mul_(0.8)
    wrong.joint = right.joint  # sampled from the one, compared with the other
    assert sample_images(fix_window(method), wrong, case.sampling, images) < 1e-6


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


# -- one step, summed exactly -------------------------------------------------------------------------------------------


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

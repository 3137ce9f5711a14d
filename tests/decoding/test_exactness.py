"""The proof: exact rules, couplings and initial drafts reach the enumerated joint distribution; known-wrong variants do not.

Two kinds of check. One step of a rule is summed exactly over drafts and coins, to 1e-12. Whole runs are compared with the
enumerated probabilities of all sequences by total variation, against the noise floor of as many independent draws. The
known-wrong variants are what released implementations do (research audit of SJD, SCD, SJD-PAC and Lumina-mGPT 2.0).
"""

import dataclasses
import itertools

import pytest
import torch
from initial_drafts import mixture
from one_step import Coins, one_step, random_probs

from vargen.decoding import (
    Accelerator,
    Draft,
    GroupedRule,
    Jacobi,
    Noise,
    Sampling,
    Speculative,
    Step,
    Tree,
    Verdict,
    decode,
    shared_noise,
    speculative_sampling,
)
from vargen.decoding.next_token.acceptance import acceptance_rule, gather_p_and_q, residual_weights, verify_chain
from vargen.decoding.next_token.drafters.jacobi import couple_maximally
from vargen.decoding.noise import Purpose
from vargen.evaluation.exactness import CHAINS, measure, refusal_from_p, uniform_bonus
from vargen.evaluation.table_models import TableModel


def joint_distance(accelerator, model: TableModel, sampling: Sampling, chains: int = CHAINS) -> float:
    """Total variation from the enumerated joint distribution, in units of the noise floor."""
    finding = measure(accelerator, model, sampling, chains)
    assert finding.impossible == 0 or isinstance(accelerator.acceptance, GroupedRule)
    return finding.times_the_floor


AT_THE_FLOOR = 1.35  # times the noise floor; the wrong variants below are told apart by the same bound
MODEL = {"vocab": 3, "tokens": 5, "seed": 4}


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("coupling", ["independent", "maximal", "gumbel"])
@pytest.mark.parametrize("rule", [speculative_sampling, shared_noise])
def test_every_rule_coupling_and_window_reaches_the_joint_distribution(rule, coupling, width):
    accelerator = Accelerator(drafter=Jacobi(width, coupling), acceptance=rule)
    assert joint_distance(accelerator, TableModel(**MODEL), Sampling()) < AT_THE_FLOOR


@pytest.mark.parametrize("initial", ["uniform", mixture])
@pytest.mark.parametrize("coupling", ["independent", "maximal", "gumbel"])
def test_every_initial_draft_reaches_the_joint_distribution(initial, coupling):
    model = TableModel(vocab=3, tokens=6, seed=4, rows=3)  # three rows of two: copies from above happen
    accelerator = Accelerator(drafter=Jacobi(4, coupling, initial), acceptance=speculative_sampling)
    assert joint_distance(accelerator, model, Sampling()) < AT_THE_FLOOR


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.7), Sampling(0.7, 3, 0.9)], ids=str)
@pytest.mark.parametrize("coupling", ["independent", "maximal", "gumbel"])
def test_filters_and_forced_tokens_reach_the_joint_distribution(sampling, coupling):
    model = TableModel(vocab=4, tokens=5, seed=9, forced={2: 1, 4: 3})
    for rule in (speculative_sampling, shared_noise):
        accelerator = Accelerator(drafter=Jacobi(4, coupling, mixture), acceptance=rule)
        assert joint_distance(accelerator, model, sampling, 60_000) < AT_THE_FLOOR


@pytest.mark.parametrize("vocab,tokens", [(5, 4), (4, 4), (3, 6)])
def test_other_sizes_reach_the_joint_distribution(vocab, tokens):
    model = TableModel(vocab=vocab, tokens=tokens, seed=vocab)
    accelerator = Accelerator(drafter=Jacobi(4, "maximal"), acceptance=speculative_sampling)
    assert joint_distance(accelerator, model, Sampling()) < AT_THE_FLOOR


class Changing:
    """Windows that go up and down, through 1, where nothing is drafted."""

    max_width, fits_any_grid = 4, False

    def __init__(self):
        self.sizes = itertools.cycle([4, 2, 1, 3])

    def start(self, model, condition, images):
        return self

    def choose_width(self):
        return next(self.sizes)

    def observe(self, num_committed, active): ...


@pytest.mark.parametrize("coupling", ["independent", "maximal", "gumbel"])
def test_changing_windows_reach_the_joint_distribution(coupling):
    accelerator = Accelerator(drafter=Jacobi(Changing(), coupling, mixture), acceptance=speculative_sampling)
    assert joint_distance(accelerator, TableModel(**MODEL), Sampling()) < AT_THE_FLOOR


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("rule", [speculative_sampling, shared_noise])
@pytest.mark.parametrize("shared", [False, True])
def test_speculative_drafts_reach_the_joint_distribution(length, rule, shared):
    small = TableModel(vocab=3, tokens=5, seed=77)
    accelerator = Accelerator(drafter=Speculative(length, small, shared), acceptance=rule)
    assert joint_distance(accelerator, TableModel(**MODEL), Sampling(top_p=0.9)) < AT_THE_FLOOR


@pytest.mark.parametrize("shared", [False, True])
def test_changing_chains_reach_the_joint_distribution(shared, monkeypatch):
    """Chains of two, one and one draft, then none any more."""

    def turns(choice):
        choice.warmup_passes -= 1
        choice.width = {3: 3, 2: 2, 1: 2}.get(choice.warmup_passes, 1)
        return choice.width

    monkeypatch.setattr("vargen.decoding.next_token.drafters.draft_model.WidthController.choose", turns)
    small = TableModel(vocab=3, tokens=5, seed=77)
    accelerator = Accelerator(drafter=Speculative("auto", small, shared), acceptance=speculative_sampling)
    assert joint_distance(accelerator, TableModel(**MODEL), Sampling(top_p=0.9)) < AT_THE_FLOOR


# -- negative controls: the same check must fail ------------------------------------------------------------------------


@acceptance_rule(exact=True)
def least_of_two(p, draft, noise, relaxation):
    """SJD at batch 2: every row commits as much as the row that accepted least; the surplus stays a draft (`surplus_tail`)."""
    verdict = speculative_sampling(p, draft, noise, relaxation)
    pairs = verdict.count.view(-1, 2)
    least = pairs.amin(1, keepdim=True).expand(-1, 2).reshape(-1)
    cut = draft.tokens.gather(1, (least - 1).clamp(max=draft.tokens.shape[1] - 1)[:, None])[:, 0]
    return dataclasses.replace(verdict, count=least, next_token=torch.where(verdict.count > least, cut, verdict.next_token))


def surplus(step):
    """Accepted drafts stay, the others are redrawn, and all are recorded as drawn from p."""
    p, draft, noise = step.probs, step.draft, step.noise
    accepted = (
        (noise.uniform(Purpose.ACCEPT)[:, :-1] * gather_p_and_q(p, draft)[1] < gather_p_and_q(p, draft)[0]).cumprod(1).bool()
    )
    resample_rejected = noise.sample(p, Purpose.RESAMPLE)
    return torch.cat([torch.where(accepted, draft.tokens, resample_rejected[:, :-1]), resample_rejected[:, -1:]], dim=1)


class StaleProbs(Jacobi):
    """SCD as released for Lumina and Janus: drafts that the coupling kept are recorded with their old probabilities."""

    def observe(self, state, step):
        state = super().observe(state, step)
        kept = state.last.resampled[:, :-1] == step.draft.tokens
        state.last.probs = state.last.probs.clone()
        state.last.probs[:, :-1] = torch.where(kept[..., None], step.draft.probs, state.last.probs[:, :-1])
        return state


class Spiky(Jacobi):
    """A uniform draft recorded as one-hot: exact, only slow (a control of the controls)."""

    def propose(self, state, tokens, length, step):
        draft = super().propose(state, tokens, length, step)
        if state.last is not None:
            return draft
        return dataclasses.replace(draft, probs=torch.zeros_like(draft.probs).scatter_(2, draft.tokens[..., None], 1.0))


WRONG = {
    "stale q of kept drafts": Accelerator(drafter=StaleProbs(4, "maximal"), acceptance=speculative_sampling),
    "least commit of a batch": Accelerator(drafter=Jacobi(4, surplus), acceptance=least_of_two),
    "refusal drawn from p": Accelerator(drafter=Jacobi(4), acceptance=refusal_from_p),
    "uniform token behind a full draft": Accelerator(drafter=Jacobi(2), acceptance=uniform_bonus),
    "grouped acceptance": Accelerator(drafter=Jacobi(4, "maximal"), acceptance=GroupedRule(size=2, delta=1.0)),
}


@pytest.mark.parametrize("variant", WRONG)
def test_the_check_fails_for_known_wrong_variants(variant):
    assert joint_distance(WRONG[variant], TableModel(**MODEL), Sampling()) > 1.5 * AT_THE_FLOOR


def test_the_check_passes_for_a_variant_that_only_looks_wrong():
    assert (
        joint_distance(Accelerator(drafter=Spiky(4), acceptance=speculative_sampling), TableModel(**MODEL), Sampling())
        < AT_THE_FLOOR
    )


# -- one step, summed exactly -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("vocab", [2, 5, 9])
def test_one_step_of_the_exact_rule_sums_to_the_target(vocab, zeros):
    p, q = random_probs(64, vocab, zeros).unbind(1)
    total, granted = one_step(speculative_sampling, p, q)
    assert (total - p).abs().max() < 1e-12
    assert torch.allclose((granted * q).sum(1), torch.minimum(p, q).sum(1), atol=1e-12)


def test_one_step_check_tells_a_refusal_from_p():
    p, q = random_probs(64, 5, False).unbind(1)
    total, _ = one_step(refusal_from_p, p, q)
    assert (total - p).abs().max() > 1e-2


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
        chance = torch.where(q[:, d] > 0, p[:, d] / q[:, d], 0.0).clamp(max=1)
        for coin, weight in ((chance * (1 - 1e-12), chance), (chance + 1e-12, 1 - chance)):
            coins = Coins(0.0, B, 2)
            coins.uniform = lambda purpose, coin=coin: coin[:, None].expand(B, 2)  # type: ignore[method-assign]
            step = Step(draft, p[:, None].expand(B, 2, V), None, verdict, coins, one, one[:, None], one)
            token = couple_maximally(step)[:, 0]
            left = coins.drawn_from[0][:, 0]
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
    assert result.stats.accepted_histogram[length + 1] == 400 * full
    assert sum(result.stats.accepted_histogram[2:]) == 400 * (full + (20 % (length + 1) > 1))

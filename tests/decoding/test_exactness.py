"""The proof: every exact rule, drafter, and topology reaches the enumerated joint distribution; known-wrong variants do not.

Two kinds of check. Whole runs are compared with the enumerated probabilities of all sequences by total variation, against the
noise floor of as many independent samples. One step of a rule is summed exactly over drafts and uniforms, to 1e-12. The
known-wrong variants are mistakes of released implementations (SJD, SCD, SJD-PAC, Lumina-mGPT 2.0, LANTERN, Sequoia, MCSD).
"""

import dataclasses
import itertools

import pytest
import torch
from combinations import COMBINATIONS, Combination, pairs, valid_combinations
from initial_drafts import mixture
from one_step import Coins, one_step, random_probs

from vargen.decoding import (
    PRESETS,
    Accelerator,
    AutoTree,
    Draft,
    Eagle,
    GroupedRule,
    Jacobi,
    JacobiTree,
    Medusa,
    Noise,
    PooledRule,
    Recycle,
    Sampling,
    Speculative,
    SpeculativeTree,
    Step,
    Tree,
    Verdict,
    Wavefront,
    decode,
    recursive_rejection,
    speculative_sampling,
    traversal,
)
from vargen.decoding.next_token.acceptance import acceptance_rule, gather_p_and_q, residual_weights, verify_chain
from vargen.decoding.next_token.drafters.jacobi import couple_maximally
from vargen.decoding.noise import Purpose
from vargen.evaluation.exactness import CASES, WRONG, measure
from vargen.evaluation.known_wrong import WRONG_TREES
from vargen.evaluation.table_models import TableModel

CHAINS = 30_000  # of the checks that must pass and of those that must fail alike
EXACT_PRESETS = [preset for preset in PRESETS.values() if preset.paradigm == "next-token" and preset.kind == "exact"]


def test_the_combinations_cover_every_pair() -> None:
    covered = set().union(*map(pairs, COMBINATIONS))
    assert covered == set().union(*map(pairs, valid_combinations())) and len(COMBINATIONS) < 80


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_combination_reaches_the_joint_distribution(combination: Combination) -> None:
    finding = measure(combination.method(), combination.case.model(), combination.case.sampling, CHAINS)
    assert finding.exact, finding


@pytest.mark.parametrize("number", range(len(EXACT_PRESETS)), ids=[preset.name for preset in EXACT_PRESETS])
def test_every_exact_preset_reaches_the_joint_distribution(number: int) -> None:
    """Fewer samples: the combinations above have the parts, and trees of 23 slots are slow."""
    case = CASES[number % len(CASES)]
    method = EXACT_PRESETS[number].fit_to_grid(case.tokens, 3)
    finding = measure(method, case.model(), case.sampling, CHAINS // 3)
    assert finding.exact, finding


REPAIRS = {
    **{f"local repair, radius {radius}": (Jacobi(4, "from-verdict", "low-res"), PooledRule(1, 0.4, radius, budget=0.0))
       for radius in (0, 1, 2)},
    **{f"wavefront, reach {reach}": (Wavefront(6, reach=reach), PooledRule(0, 2.0, budget=0.0)) for reach in (0, 1)},
}  # fmt: skip


@pytest.mark.parametrize("name", REPAIRS)
def test_relaxed_rules_without_a_budget_reach_the_joint_distribution(name: str) -> None:
    drafter, rule = REPAIRS[name]
    finding = measure(Accelerator(drafter=drafter, acceptance=rule), CASES[1].model(), CASES[1].sampling, CHAINS)
    assert finding.exact, finding


class ChangingWindow:
    """Windows that become larger and smaller, through 1, where nothing is drafted."""

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
    accelerator = Accelerator(drafter=Jacobi(ChangingWindow(), coupling, mixture), acceptance=speculative_sampling)
    assert measure(accelerator, CASES[0].model(), Sampling(), CHAINS).exact


def test_changing_chains_reach_the_joint_distribution(monkeypatch):
    """Chains of two, one and one draft, then none any more."""

    def turns(choice):
        choice.warmup_passes -= 1
        choice.width = {3: 3, 2: 2, 1: 2}.get(choice.warmup_passes, 1)
        return choice.width

    monkeypatch.setattr("vargen.decoding.next_token.drafters.draft_model.WidthController.choose", turns)
    accelerator = Accelerator(drafter=Speculative("auto"), acceptance=speculative_sampling)
    assert measure(accelerator, CASES[2].model(), CASES[2].sampling, CHAINS).exact


@pytest.mark.parametrize("drafter", [
    SpeculativeTree(AutoTree(6, 3, 2), "without-replacement"), JacobiTree(AutoTree(6, 3, 2), "maximal"),
    Eagle(AutoTree(6, 3, 2)), Medusa(AutoTree(6, 3, 2)),
], ids=lambda drafter: type(drafter).__name__)  # fmt: skip
def test_changing_trees_reach_the_joint_distribution(drafter, monkeypatch):
    """A tree, a chain, nothing, another tree."""
    shapes = itertools.cycle([(-1, 0, 0, 1, 2), (-1, 0, 1, 2), (-1,), (-1, 0, 1, 1), (-1, 0, 0)])
    monkeypatch.setattr(
        "vargen.decoding.next_token.trees.search.TreeController.observe",
        lambda choice, step, total: setattr(choice, "parents", next(shapes)),
    )
    accelerator = Accelerator(drafter=drafter, acceptance=recursive_rejection)
    assert measure(accelerator, CASES[0].model(), Sampling(), CHAINS).exact


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


@dataclasses.dataclass(frozen=True)
class EvenQ(Eagle):
    """Records the q of a drafter that would sample uniformly."""

    def propose(self, state, tokens, length, noise):
        draft = super().propose(state, tokens, length, noise)
        return dataclasses.replace(draft, probs=torch.full_like(draft.probs, 1 / 3))


class Overstated(Recycle):
    """Its drafts are recorded as sampled from something else."""

    def propose(self, state, tokens, length, noise):
        draft = super().propose(state, tokens, length, noise)
        return dataclasses.replace(draft, probs=draft.probs.roll(1, dims=-1) * 0.5 + 0.5 * draft.probs)


class RolledQ(Jacobi):
    """Initial drafts are recorded with the probabilities of other tokens."""

    def propose(self, state, tokens, length, noise):
        draft = super().propose(state, tokens, length, noise)
        return draft if state.last else dataclasses.replace(draft, probs=draft.probs.roll(1, -1))


class Spiky(Jacobi):
    """A uniform draft recorded as one-hot: exact, only slow (a control of the controls)."""

    def propose(self, state, tokens, length, noise):
        draft = super().propose(state, tokens, length, noise)
        if state.last is not None:
            return draft
        return dataclasses.replace(draft, probs=torch.zeros_like(draft.probs).scatter_(2, draft.tokens[..., None], 1.0))


CONTROLS = {
    **WRONG,
    **WRONG_TREES,
    "stale q of kept drafts": Accelerator(drafter=StaleProbs(4, "maximal"), acceptance=speculative_sampling),
    "fewest committed tokens of a batch": Accelerator(drafter=Jacobi(4, surplus), acceptance=least_of_two),
    "grouped acceptance": Accelerator(drafter=Jacobi(4, "maximal"), acceptance=GroupedRule(size=2, delta=1.0)),
    "q of a low resolution": Accelerator(drafter=RolledQ(4, "maximal", "low-res"), acceptance=speculative_sampling),
    "q of a trained chain": Accelerator(drafter=EvenQ(3), acceptance=speculative_sampling),
    "q of a trained tree": Accelerator(drafter=EvenQ((-1, 0, 0, 1, 1, 2)), acceptance=traversal),
    "q of recycled tokens": Accelerator(drafter=Overstated(4), acceptance=speculative_sampling),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_the_check_fails_for_known_wrong_variants(name):
    finding = measure(CONTROLS[name], CASES[0].model(), Sampling(), CHAINS)
    assert not finding.exact, finding


def test_the_check_passes_for_a_variant_that_only_looks_wrong():
    assert measure(Accelerator(drafter=Spiky(4), acceptance=speculative_sampling), CASES[0].model(), Sampling(), CHAINS).exact


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
    total, _ = one_step(WRONG["rejected token resampled from p"].acceptance, p, q)
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

"""Grouped acceptance: what it grants beyond the exact rule is what it reports, and no more than its budget."""

import pytest
import torch

from vargen.decoding import Accelerator, Draft, GroupedRule, Jacobi, Noise, Sampling, Tree, decode, speculative_sampling
from vargen.decoding.noise import sample_gumbel_max
from vargen.evaluation.table_models import TableModel


def window_of_laws(images: int, vocab: int, drafts: int, seed: int = 0) -> tuple[torch.Tensor, Draft, Noise]:
    """Random target probabilities and drafts from others, some of them filtered to a few tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, images, drafts + 1, vocab, generator=generator) ** 4
    weights[:, ::3] *= weights[:, ::3] > weights[:, ::3].median(-1, keepdim=True).values
    probs, drafted = weights / weights.sum(-1, keepdim=True)
    drafted = drafted[:, 1:]
    seeds, position = torch.arange(images), torch.arange(drafts + 1).expand(images, -1)
    tokens = sample_gumbel_max(drafted, seeds + 999, position[:, 1:])
    return probs, Draft(tokens, Tree.make_chain(drafts), drafted), Noise(seeds, position, 7)


def plain_group(p: list[float], token: int, size: int, delta: float) -> set[int]:
    """The published group by sorting: the nearest ranks, half above and half below, filtered."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i != token, i))
    rank = order.index(token)
    near = order[max(0, rank - size // 2) : rank] + order[rank + 1 : rank + 1 + (size + 1) // 2]
    return {i for i in near if p[i] > 0 and abs(p[i] - p[token]) < delta}


@pytest.mark.parametrize("size", [1, 2, 3, 6, 40])
@pytest.mark.parametrize("delta", [0.05, 0.3, 1.0])
def test_groups_equal_a_plain_walk_over_ranks(size, delta):
    probs, draft, _ = window_of_laws(20, 12, 4)
    rule = GroupedRule(size=size, delta=delta)
    member = rule.group_members(probs[:, :-1], draft.tokens)
    for image in range(20):
        for slot in range(4):
            token = int(draft.tokens[image, slot])
            found = set(member[image, slot].tolist()) - {token}
            assert found == plain_group(probs[image, slot].tolist(), token, size, delta)


def test_the_distance_filter_leaves_out_codes_that_look_different():
    probs, draft, _ = window_of_laws(10, 12, 4)
    codes = torch.nn.functional.normalize(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), dim=-1)
    model = TableModel(vocab=12, tokens=4)
    model.codebook = codes
    rule = GroupedRule(size=12, delta=1.0, distance=0.8).bind(model)
    assert rule == GroupedRule(size=12, delta=1.0, distance=0.8)  # a bound rule is still the same method
    member = rule.group_members(probs[:, :-1], draft.tokens)
    gap = (codes[member] - codes[draft.tokens][..., None, :]).square().sum(-1)
    assert (gap < 0.8).all()
    loose = GroupedRule(size=12, delta=1.0).group_members(probs[:, :-1], draft.tokens)
    assert (member != draft.tokens[..., None]).sum() < (loose != draft.tokens[..., None]).sum()


def test_relaxation_is_what_was_granted_up_to_the_first_refusal():
    probs, draft, noise = window_of_laws(3000, 8, 5)
    rule, nothing = GroupedRule(size=4, delta=0.5), torch.zeros(3000)
    relaxed, strict = rule(probs, draft, noise, nothing), speculative_sampling(probs, draft, noise, nothing)
    assert (relaxed.count >= strict.count).all() and (relaxed.count > strict.count).any()
    assert (relaxed.relaxation >= 0).all() and (relaxed.relaxation <= relaxed.count).all()
    # Whoever spent nothing was judged exactly.
    free = relaxed.relaxation == 0
    assert free.any() and torch.equal(relaxed.count[free], strict.count[free])
    assert torch.equal(relaxed.next_token[free], strict.next_token[free])


def test_mean_relaxation_bounds_the_one_step_total_variation():
    """Summed over drafts, acceptance granted minus exact acceptance is at least the distance of the output probs from p."""
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.rand(2, 1, 6, generator=generator) ** 3).double()
    p, q = p / p.sum(), q / q.sum()
    rule = GroupedRule(size=3, delta=1.0)
    chance = torch.zeros(6, dtype=torch.float64)
    for d in range(6):
        draft = Draft(torch.tensor([[d]]), Tree.make_chain(1), q[:, None])
        member = rule.group_members(p[:, None], draft.tokens)[0, 0]
        group = [d, *{int(m) for m in member} - {d}]
        chance[d] = max(min(1.0, float(p[0, group].sum() / q[0, group].sum())), min(1.0, float(p[0, d] / q[0, d])))
    left = (p[0] - q[0]).clamp(min=0)
    output = q[0] * chance + (1 - (q[0] * chance).sum()) * left / left.sum()
    granted = (q[0] * (chance - torch.minimum(torch.ones(6), p[0] / q[0]))).sum()
    assert granted > 0.01
    assert (output - p[0]).abs().sum() / 2 <= granted + 1e-12


@pytest.mark.parametrize("budget", [0.0, 0.3, 2.0])
def test_no_image_spends_more_than_its_budget(budget):
    model = TableModel(vocab=8, tokens=40, seed=6)
    rule = GroupedRule(size=6, delta=1.0, budget=budget)
    arguments = (model, torch.zeros(64, dtype=torch.int64), torch.arange(64))
    result = decode(*arguments, Accelerator(drafter=Jacobi(8), acceptance=rule))
    spent = torch.tensor(result.stats.relaxation)
    assert spent.max() <= budget + 1e-5
    free = decode(*arguments, Accelerator(drafter=Jacobi(8), acceptance=GroupedRule(6, 1.0)))
    assert torch.tensor(free.stats.relaxation).min() > 2.0  # the budgets above do bind


def test_a_budget_of_nothing_is_the_exact_rule():
    model = TableModel(vocab=6, tokens=30, seed=6)
    condition, seeds = torch.zeros(16, dtype=torch.int64), torch.arange(16)
    tight = decode(model, condition, seeds, Accelerator(drafter=Jacobi(6), acceptance=GroupedRule(4, 1.0, budget=0)))
    strict = decode(model, condition, seeds, Accelerator(drafter=Jacobi(6), acceptance=speculative_sampling))
    assert torch.equal(tight.tokens, strict.tokens)
    assert tight.stats.passes == strict.stats.passes


def test_forced_tokens_stay_forced():
    model = TableModel(vocab=6, tokens=20, seed=6, forced={3: 2, 10: 0, 19: 5})
    accelerator = Accelerator(drafter=Jacobi(6, "maximal"), acceptance=GroupedRule(size=6, delta=1.0))
    result = decode(model, torch.zeros(200, dtype=torch.int64), torch.arange(200), accelerator, Sampling())
    assert (result.tokens[:, [3, 10, 19]] == torch.tensor([2, 0, 5])).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size"),
        ({"size": 2.5}, "size"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.5}, "delta"),
        ({"distance": 0.0}, "distance"),
        ({"budget": -1.0}, "budget"),
        ({"budget": float("nan")}, "budget"),
    ],
)
def test_bad_parameters_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        GroupedRule(**arguments)


def test_distance_needs_a_codebook():
    accelerator = Accelerator(drafter=Jacobi(4), acceptance=GroupedRule(distance=0.5))
    with pytest.raises(ValueError, match="codebook"):
        decode(TableModel(vocab=4, tokens=9), torch.zeros(1, dtype=torch.int64), torch.arange(1), accelerator)

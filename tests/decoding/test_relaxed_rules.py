"""Relaxed rules: what one step costs is exactly the acceptance that they grant, report and cap; wrong residuals cost
more."""

import dataclasses
import math

import pytest
import torch
from table_methods import RELAXED_RULES, TREE_RULES, TopKTree, bind_rule, random_probs

from vargen.decoding import (
    Accelerator,
    Draft,
    DynamicTree,
    GroupedRule,
    Jacobi,
    Noise,
    Sampling,
    Speculative,
    Tree,
    speculative_sampling,
)
from vargen.decoding.experimental import JacobiTree, SampledTree, SpeculativeTree, TypicalRule
from vargen.decoding.noise import Purpose
from vargen.decoding.tree_rules import DraftTokens
from vargen.evaluation.exact_sum import sum_pass
from vargen.evaluation.exactness import DETECTED, TOLERANCE, Case

# -- one step, summed exactly -----------------------------------------------------------------------------------------

ONE_LEFT = Case("one token left", 2, vocab=5, sampling=Sampling(top_p=0.97))


@pytest.mark.parametrize("rule", RELAXED_RULES.values(), ids=RELAXED_RULES)
@pytest.mark.parametrize(
    "drafter",
    [Jacobi(2), Speculative(1), SpeculativeTree(DynamicTree(1, 1, 1)), TopKTree(DynamicTree(1, 1, 1))],
    ids=["jacobi", "small model", "tree", "tree without q"],
)
def test_one_step_is_as_far_from_the_target_as_the_relaxation_that_it_reports(drafter, rule):
    """With one position left to draft, the total variation is the mean relaxation; any other residual would be further away."""
    if drafter.topology == "tree" and "tree" not in rule.topologies:
        pytest.skip("a rule of chains")
    found = sum_pass(Accelerator(drafter=drafter, acceptance=rule), ONE_LEFT.model(), sampling=ONE_LEFT.sampling)
    assert found.distance > 0.005 and abs(found.distance - found.relaxation) <= TOLERANCE


# -- whole runs -------------------------------------------------------------------------------------------------------


CASE = Case("1 x 4", 4)


@pytest.mark.parametrize(
    "rule", [*RELAXED_RULES.values(), TypicalRule(0.5, 0.6, tightening=0.7), GroupedRule(4, 1.0, tightening=1.0)], ids=str
)
@pytest.mark.parametrize("drafter", [Jacobi(4, "maximal"), Speculative(3)], ids=["jacobi", "small model"])
def test_images_are_no_further_from_the_target_than_was_reported(rule, drafter):
    sum_reported(Accelerator(drafter=drafter, acceptance=rule), passes=2)


def sum_reported(method, passes=1):
    """Check that the distance of a relaxed method is at most the relaxation that it reports; without a budget, it is exact."""
    found = sum_pass(method, CASE.model(), passes=passes)
    assert DETECTED <= found.distance <= found.relaxation + TOLERANCE
    strict = dataclasses.replace(method, acceptance=dataclasses.replace(method.acceptance, budget=0.0))
    exact = sum_pass(strict, CASE.model(), passes=passes)
    assert max(exact.distance, exact.draft_distance) <= TOLERANCE and exact.relaxation <= TOLERANCE


# -- trees ------------------------------------------------------------------------------------------------------------

TREES = {
    "drawn without replacement": SpeculativeTree(DynamicTree(nodes=5, depth=2, children=2)),
    "drawn independently": SampledTree(branching=(2, 2)),
    "the likeliest, dynamic": TopKTree(DynamicTree(nodes=5, depth=3, children=2)),
    "of a window": JacobiTree(7, 2, 2, "maximal"),
}


@pytest.mark.parametrize("drafter", TREES.values(), ids=TREES)
@pytest.mark.parametrize(
    "rule", [RELAXED_RULES["grouped"], RELAXED_RULES["neighborhood by both"], TypicalRule(0.5, 0.6, tightening=0.7)], ids=str
)
def test_images_of_trees_are_no_further_from_the_target_than_was_reported(rule, drafter):
    sum_reported(Accelerator(drafter=drafter, acceptance=rule))


@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES)
@pytest.mark.parametrize("budget", [None, 0.4])
def test_a_walk_over_a_tree_that_is_a_chain_judges_as_on_the_chain(rule, budget):
    p, q = random_probs(500 * 5, 9, True).float().unflatten(0, (500, 5)).unbind(2)
    noise = Noise(torch.arange(500), torch.arange(5).expand(500, -1), 3)
    tokens = noise.sample(q, Purpose.DRAFT)[:, 1:]
    valid = torch.arange(4) < 2 + torch.arange(500)[:, None] % 3
    chain, walk = Tree.make_chain(4), Tree.batched(torch.arange(-1, 4).expand(500, -1), max_path=5, max_children=1)
    rule, spent = bind_rule(dataclasses.replace(rule, budget=budget, tightening=0.3), 9), torch.linspace(0, 0.5, 500)
    a, b = (rule(p, Draft(tokens, tree, q[:, 1:], valid), noise, spent) for tree in (chain, walk))
    assert torch.equal(a.count, b.count) and (a.count > 2).any()
    assert torch.allclose(a.relaxation, b.relaxation, atol=1e-6)
    assert (a.next_token == b.next_token).float().mean() > 0.99  # one residual sums to one, the other does not: rounding


# -- the schedule of Cool-SD ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RELAXED_RULES.values(), ids=RELAXED_RULES)
def test_a_tightening_rule_grants_late_drafts_exponentially_less(rule):
    p, q = random_probs(400, 9, False).float().unbind(1)
    probs, drafted = p[:, None].expand(-1, 6, -1), q[:, None].expand(-1, 5, -1)
    draft = Draft(torch.arange(400)[:, None].expand(-1, 5) % 9, Tree.make_chain(5), drafted)
    loose, tight = (bind_rule(dataclasses.replace(rule, tightening=nu), 9) for nu in (0.0, 0.7))
    drafts = DraftTokens(probs[:, :-1], drafted, draft.tokens, draft.tree.depth[1:])
    all_alike, tapered = (rule.relaxation(drafts) for rule in (loose, tight))
    assert torch.allclose(all_alike, all_alike[:, :1].expand(-1, 5))  # the same draft of the same probabilities
    assert torch.allclose(tapered, all_alike * torch.tensor([math.exp(-0.7 * i) for i in range(5)]))
    assert all_alike.max() > 0.05


# -- bad input --------------------------------------------------------------------------------------------------------


def test_noise_is_not_touched_by_what_is_allowed():
    """The same coins as the exact rule: who spent nothing was judged exactly."""
    p, q = random_probs(3000, 8, False).float().unbind(1)
    probs, drafted = p[:, None].expand(-1, 4, -1), q[:, None].expand(-1, 3, -1)
    noise = Noise(torch.arange(3000), torch.arange(4).expand(3000, -1), 7)
    tokens = noise.select_slot(torch.zeros(3000).long()).sample(drafted[:, :1], Purpose.DRAFT).expand(-1, 3)
    draft = Draft(tokens, Tree.make_chain(3), drafted)
    strict = speculative_sampling(probs, draft, noise, torch.zeros(3000))
    for rule in RELAXED_RULES.values():
        relaxed = bind_rule(rule, 8)(probs, draft, noise, torch.zeros(3000))
        free = relaxed.relaxation == 0
        assert free.any() and torch.equal(relaxed.count[free], strict.count[free]), rule
        assert (relaxed.count >= strict.count).all()

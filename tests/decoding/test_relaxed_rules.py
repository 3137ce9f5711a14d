"""Relaxed rules: what one step costs is exactly the acceptance that they grant, report and cap; wrong residuals cost
more."""

import dataclasses
import math

import pytest
import torch
from one_step import Coins, one_step, random_probs
from table_methods import RELAXED_RULES, TREE_RULES, TopKTree, bind_rule, total_variation

from vargen.decoding import (
    Accelerator,
    Draft,
    DynamicTree,
    Eagle,
    GroupedRule,
    Jacobi,
    Noise,
    Speculative,
    Tree,
    speculative_sampling,
)
from vargen.decoding.experimental import JacobiTree, SampledTree, SpeculativeTree, TypicalRule
from vargen.decoding.noise import Purpose
from vargen.decoding.tree_rules import DraftTokens
from vargen.verify.exact_sum import sum_pass
from vargen.verify.exactness import DETECTED, TOLERANCE, Case
from vargen.verify.tables import TableEagle, TableModel

# -- the law of one step, by enumeration ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RELAXED_RULES.values(), ids=RELAXED_RULES)
@pytest.mark.parametrize("zeros", [False, True])
def test_one_step_is_as_far_from_the_target_as_the_acceptance_that_is_added_and_reported(rule, zeros):
    p, q = random_probs(64, 9, zeros).unbind(1)
    rule = bind_rule(rule, 9)
    output, probability = one_step(rule, p, q)
    extra = (q * probability).sum(1) - torch.minimum(p, q).sum(1)
    assert torch.allclose(output.sum(1), torch.ones(64, dtype=torch.float64))
    assert (total_variation(output, p) - extra).abs().max() < 1e-9
    assert extra.min() > -1e-12 and extra.max() > 0.05
    reported = torch.zeros(64, dtype=torch.float64)  # the mean over draft tokens, whatever the uniforms are
    for d in range(9):
        draft = Draft(torch.full((64, 1), d), Tree.make_chain(1), q[:, None])
        reported += q[:, d] * rule(p[:, None].expand(-1, 2, -1), draft, Coins(0.5, 64, 2), torch.zeros(64)).relaxation
    assert (total_variation(output, p) - reported).abs().max() < 1e-9


@pytest.mark.parametrize("rule", RELAXED_RULES.values(), ids=RELAXED_RULES)
def test_deterministic_drafts_obey_the_same_law(rule):
    p, _ = random_probs(64, 9, False).unbind(1)
    rule = bind_rule(rule, 9)
    draft = Draft(torch.full((64, 1), 3), Tree.make_chain(1))
    one_hot = torch.zeros_like(p).index_fill_(1, torch.tensor([3]), 1.0)
    output, probability = one_step(rule, p, one_hot)
    verdict = rule(p[:, None].expand(-1, 2, -1), draft, Coins(0.5, 64, 2), torch.zeros(64))
    assert (total_variation(output, p) - (probability[:, 3] - p[:, 3])).abs().max() < 1e-9
    assert torch.allclose(verdict.relaxation, probability[:, 3] - p[:, 3], atol=1e-9)


@pytest.mark.parametrize("rule", RELAXED_RULES.values(), ids=RELAXED_RULES)
def test_a_draft_refused_by_rounding_alone_is_redrawn_from_the_target(rule):
    p, _ = random_probs(16, 9, True).unbind(1)
    uniforms = Coins(1e300, 16, 2)
    bind_rule(rule, 9)(
        p[:, None].expand(-1, 2, -1), Draft(torch.zeros(16, 1).long(), Tree.make_chain(1), p[:, None]), uniforms, p[:, 0]
    )
    assert torch.equal(uniforms.drawn_from[0][:, 0], p)


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


def test_what_is_allowed_is_how_far_one_step_is_from_the_target() -> None:
    """With one position left to draft, the total variation is the mean relaxation."""
    model = TableModel(vocab=4, tokens=2, seed=1)
    model.draft_heads = {"eagle": TableEagle(TableModel(vocab=4, tokens=2, seed=9))}
    method = Accelerator("x", Eagle(DynamicTree(nodes=1, depth=1, children=1)), RELAXED_RULES["typical"])
    found = sum_pass(method, model)
    assert found.distance > 0.02 and abs(found.distance - found.relaxation) <= TOLERANCE


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

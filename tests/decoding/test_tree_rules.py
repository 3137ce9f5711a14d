"""Exact rules on trees, beyond exactness: what equals what, trees of each image, invalid slots, budgets."""

import pytest
import torch
from torch import Tensor

from vargen.decoding import (
    Accelerator,
    Draft,
    DynamicTree,
    Noise,
    Tree,
    decode,
    shared_noise,
    speculative_sampling,
    traversal,
)
from vargen.decoding.experimental import SpeculativeTree, k_seq, recursive_rejection
from vargen.decoding.rules import acceptance_rule
from vargen.decoding.tree_rules import SiblingDecision, verify_siblings
from vargen.verify.tables import TableModel

# -- laws beyond exactness ----------------------------------------------------------------------------------------------


def random_chain(B: int, drafts: int, V: int) -> tuple[Tensor, Draft, Noise]:
    generator = torch.Generator().manual_seed(7)
    probs = torch.rand(B, drafts + 1, V, generator=generator).softmax(-1)
    q = (torch.rand(B, drafts, V, generator=generator) * 2).softmax(-1)
    valid = torch.rand(B, drafts, generator=generator) > 0.1
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(B, drafts)
    noise = Noise(torch.arange(B), torch.arange(drafts + 1).expand(B, -1) + 3, step=2)
    return probs, Draft(tokens, Tree.make_chain(drafts), q, valid), noise


def test_on_a_chain_recursive_rejection_is_the_exact_rule():
    probs, draft, noise = random_chain(400, 5, 6)
    one, other = (rule(probs, draft, noise, torch.zeros(400)) for rule in (speculative_sampling, recursive_rejection))
    assert torch.equal(one.count, other.count) and torch.equal(one.next_token, other.next_token)
    assert other.count.float().mean() > 1.5


def test_a_tree_of_each_image_is_verified_as_that_tree_alone():
    shapes = [(-1, 0, 0, 1, 1, 2), (-1, 0, 1, 2, 3, 4), (-1, 0, 0, 0, 3, 3)]
    generator = torch.Generator().manual_seed(3)
    B, T, V = 3, 6, 7
    probs = torch.rand(B, T, V, generator=generator).softmax(-1)
    for trial in range(40):
        q = torch.rand(B, T - 1, V, generator=generator).softmax(-1)
        tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(B, T - 1)
        noise = Noise(torch.arange(B) + 10 * trial, torch.zeros(B, T, dtype=torch.int64), 1)
        together = Draft(tokens, Tree.batched(torch.tensor(shapes), max_path=6, max_children=3), q)
        for rule in (recursive_rejection, traversal, shared_noise, k_seq):
            verdict = rule(probs, together, noise, torch.zeros(B))
            for row, parents in enumerate(shapes):
                alone = Draft(tokens[row : row + 1], Tree.from_parents(parents), q[row : row + 1])
                own = Noise(noise.seeds[row : row + 1], noise.position[row : row + 1], 1)
                single = rule(probs[row : row + 1], alone, own, torch.zeros(1))
                count = int(single.count)
                assert count == int(verdict.count[row])
                assert torch.equal(single.path[0, :count], verdict.path[row, :count])
                assert int(single.next_token) == int(verdict.next_token[row])


@pytest.mark.parametrize("rule", [recursive_rejection, traversal, k_seq])
def test_what_is_not_valid_is_refused_and_changes_nothing(rule):
    """A draft with invalid slots is judged as the draft without them."""
    generator = torch.Generator().manual_seed(5)
    parents, kept = (-1, 0, 0, 1, 1, 2), (-1, 0, 1, 1)  # without slots 2 and 5
    probs = torch.rand(200, 6, 5, generator=generator).softmax(-1)
    q = torch.rand(200, 1, 5, generator=generator).softmax(-1).expand(-1, 5, -1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(200, 5)
    valid = torch.tensor([True, False, True, True, False]).expand(200, -1)
    noise = Noise(torch.arange(200), torch.zeros(200, 6, dtype=torch.int64))
    masked = rule(probs, Draft(tokens, Tree.from_parents(parents), q, valid), noise, torch.zeros(200))
    slots = [1, 3, 4]
    less = Draft(tokens[:, [s - 1 for s in slots]], Tree.from_parents(kept), q[:, :3])
    small = Noise(noise.seeds, noise.position[:, :4])
    if rule is traversal:  # coins are of slots: let both agree on which
        reached = masked.count > 1
        assert not torch.isin(masked.path[reached, 1], torch.tensor([2, 5])).any()
        return
    plain = rule(probs[:, [0, *slots]], less, small, torch.zeros(200))
    assert torch.equal(masked.count, plain.count) and torch.equal(masked.next_token, plain.next_token)


def test_a_budget_caps_what_a_path_is_allowed_and_zero_is_exact():
    """A rule that would accept everything, on trees of its own for each image."""

    def generous(budget):
        def test(siblings):
            probability = siblings.exact_accept_prob
            return SiblingDecision(probability, relaxation=1 - probability)

        @acceptance_rule(exact=False, topologies=("tree",))
        def rule(probs, draft, noise, relaxation):
            return verify_siblings(test, probs, draft, noise, relaxation, budget)

        return rule

    generator = torch.Generator().manual_seed(9)
    B, parents = 500, torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 1, 2, 0]]).repeat(250, 1)
    probs = (3 * torch.rand(B, 6, 8, generator=generator)).softmax(-1)
    q = (3 * torch.rand(B, 5, 8, generator=generator)).softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(B, 5)
    draft = Draft(tokens, Tree.batched(parents, 6, 3), q)
    noise, none = Noise(torch.arange(B), torch.zeros(B, 6, dtype=torch.int64)), torch.zeros(B)
    free = generous(None)(probs, draft, noise, none)
    assert free.relaxation.max() > 1 and (free.count == free.count.max()).float().mean() > 0.4
    spent_before = torch.rand(B, generator=generator) * 0.5
    capped = generous(0.6)(probs, draft, noise, spent_before)
    assert (capped.relaxation <= 0.6 - spent_before + 1e-5).all() and capped.relaxation.mean() > 0.15
    assert capped.count.float().mean() < free.count.float().mean()
    nothing, plain = generous(0.0)(probs, draft, noise, none), recursive_rejection(probs, draft, noise, none)
    assert torch.equal(nothing.count, plain.count) and torch.equal(nothing.next_token, plain.next_token)
    assert (nothing.relaxation == 0).all()


def test_traversal_accepts_more_than_recursive_rejection():
    found = {}
    for rule in (recursive_rejection, traversal):
        complete = SpeculativeTree(DynamicTree(14, 3, 2, frontier=4))
        accelerator = Accelerator(drafter=complete, acceptance=rule)
        model = TableModel(vocab=6, tokens=40, seed=2)
        model.draft_model = TableModel(vocab=6, tokens=40, seed=2, spread=0.9)
        stats = decode(model, torch.zeros(600, dtype=torch.int64), torch.arange(600), accelerator).stats
        found[rule] = stats.tokens_per_pass
    assert found[traversal] > found[recursive_rejection] > 1.5

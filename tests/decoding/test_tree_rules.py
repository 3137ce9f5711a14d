"""Exact rules on trees, beyond exactness: what equals what, trees of each image, invalid slots, budgets."""

import pytest
import torch

from vargen.decoding import Draft, Noise, Tree, shared_noise, traversal
from vargen.decoding.experimental import k_seq, recursive_rejection

# -- laws beyond exactness ----------------------------------------------------------------------------------------------


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

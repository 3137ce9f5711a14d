"""Trees: shapes, growth on the device, what statistics say of siblings, and bad input."""

import itertools
import math

import pytest
import torch
from rejects import rejects

from vargen.decoding import (
    Accelerator,
    Draft,
    DynamicTree,
    JacobiTree,
    Noise,
    SpeculativeTree,
    StaticTree,
    Tree,
    decode,
    k_seq,
    recursive_rejection,
    shared_noise,
    traversal,
)
from vargen.decoding.next_token.trees.expand import Frontier, grow_tree
from vargen.decoding.next_token.trees.shapes import (
    NAMED_SHAPES,
    make_branching,
    make_by_level_sizes,
    make_fan,
    make_k_ary,
    parse_parents,
)
from vargen.decoding.noise import sample_exponential
from vargen.evaluation.table_models import TableModel


def depths(parents):
    found = [0]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


def test_static_trees_have_the_shape_that_they_are_named_for():
    assert make_k_ary(2, 2) == (-1, 0, 0, 1, 1, 2, 2)
    assert make_branching([3, 1]) == (-1, 0, 0, 0, 1, 2, 3)
    assert make_fan(8, 2, 1) == (-1, 0, 0, 1, 3, 4, 5, 6)
    for widths in [(4, 5, 4, 2), (1, 1, 1), (3, 9)]:
        found = depths(make_by_level_sizes(widths))
        assert [found.count(step) for step in range(1, len(widths) + 1)] == list(widths)
    for name, parents in NAMED_SHAPES.items():
        assert parse_parents(name) == parents == parse_parents(list(parents))
    assert StaticTree(make_k_ary(2, 3)).limit_depth(2).parents_tuple == make_k_ary(2, 2)
    assert StaticTree(make_k_ary(3, 2)).limit_children(2).parents_tuple == make_k_ary(2, 2)


def test_children_ranks_and_postorder_follow_the_parents():
    tree = Tree.from_parents((-1, 0, 0, 1, 1, 2, 4))
    assert tree.sibling_rank.tolist() == [0, 0, 1, 0, 1, 0, 0] and tree.max_children == 2
    assert tree.children.tolist() == [[1, 2], [3, 4], [5, 0], [0, 0], [6, 0], [0, 0], [0, 0]]
    assert tree.postorder.argsort().tolist() == [3, 6, 4, 1, 5, 2, 0]
    together = Tree.batched(tree.parents.expand(2, -1), 4, 2)
    for part in ("sibling_rank", "children", "postorder", "earlier_siblings"):
        assert torch.equal(getattr(together, part)[1], getattr(tree, part))
    assert Tree.make_chain(0).children.shape == (1, 0)


# -- growth ---------------------------------------------------------------------------------------------------------------


def table(B: int, V: int, seed: int = 0, peaky: float = 2.0):
    """What follows a token, `[B, V + 1, V]`: a first-order model."""
    logits = peaky * torch.randn(B, V + 1, V, generator=torch.Generator().manual_seed(seed))
    return logits.softmax(-1)


def grown(shape, child_sampling, q, step=1, total=1000):
    B, V = len(q), q.shape[-1]
    image = torch.arange(B)[:, None]
    root = torch.full((B,), V)
    frontiers = []

    def expand(frontier: Frontier):
        frontiers.append(frontier)
        assert torch.equal(frontier.expanded_tokens[:, -frontier.tokens.shape[1] :], frontier.tokens)
        return q[image, frontier.tokens]

    noise = Noise(torch.arange(B), torch.full((B, 1), 5), step)
    return grow_tree(expand, shape, child_sampling, root, noise, total), frontiers


def paths(draft: Draft, row: int, root: int) -> dict[tuple[int, ...], int]:
    """The slot of each path of tokens from the root."""
    parents, tokens = draft.tree.parents.expand(len(draft.tokens), -1)[row].tolist(), [root, *draft.tokens[row].tolist()]
    found: list[tuple[int, ...]] = [()]
    for slot in range(1, len(parents)):
        assert 0 <= parents[slot] < slot
        found.append((*found[parents[slot]], tokens[slot]))
    assert len(set(found)) == len(found), "siblings differ"
    return {path: slot for slot, path in enumerate(found)}


def test_a_dynamic_tree_of_the_best_is_that_of_eagle():
    """Level by level the likeliest K of the last level's candidates are expanded, and the likeliest N of all stay."""
    B, V, K, N, D = 20, 12, 3, 9, 4
    q = table(B, V)
    draft, frontiers = grown(DynamicTree(N, D, K), "top-k", q)
    assert draft.probs is None and [f.tokens.shape[1] for f in frontiers] == [1, 3, 3, 3]
    for row in range(B):
        level, pool = [((), 0.0)], []
        for _ in range(D):
            candidates = []
            for path, score in level:
                after = q[row, path[-1] if path else V].log()
                candidates += [((*path, t), score + after[t].item()) for t in after.topk(K).indices.tolist()]
            pool += candidates
            level = sorted(candidates, key=lambda each: -each[1])[:K]
        kept = {path for path, _ in sorted(pool, key=lambda each: -each[1])[:N]}
        assert set(paths(draft, row, V)) == kept | {()}


@pytest.mark.parametrize("child_sampling", ["top-k", "without-replacement", "shared-noise"])
def test_ties_never_part_a_child_from_its_parent(child_sampling):
    """Certain tokens, and tokens that are all alike: children are worth as much as their parents."""
    V = 6
    certain = torch.nn.functional.one_hot((torch.arange(V + 1) + 1) % V, V).float().expand(3, -1, -1)
    even = torch.full((3, V + 1, V), 1 / V)
    for q in (certain, even, torch.cat([certain[:1], even[:2]])):
        for nodes in (3, 7, 12):
            draft, _ = grown(DynamicTree(nodes, 4, 3), child_sampling, q)
            assert draft.valid is not None
            parents = draft.tree.parents
            assert (parents[:, 1:] < torch.arange(1, nodes + 1)).all() and (parents[:, 1:] >= 0).all()
            above = torch.nn.functional.pad(draft.valid, (1, 0), value=True).gather(1, parents[:, 1:])
            assert (above | ~draft.valid).all(), "what follows an invalid slot is invalid"
    draft, _ = grown(DynamicTree(4, 4, 3), "top-k", certain)
    assert draft.valid is not None and draft.valid.all(), "the certain chain, and none of what has no probability"
    assert draft.tree.parents[0].tolist() == [-1, 0, 1, 2, 3]


def test_children_are_sampled_without_replacement_in_the_order_of_their_keys():
    """Kool et al. 2019: the largest of log q + G, which are a sequential draw; q of each is what its elders left."""
    B, V = 4000, 5
    q = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).expand(B, V + 1, V)
    draft, _ = grown(StaticTree((-1, 0, 0, 0)), "without-replacement", q)
    keys = q[:, 0].log() - sample_exponential(torch.arange(B), torch.full((B, 1), 5), V, purpose=3, step=1)[:, 0].log()
    assert torch.equal(draft.tokens, keys.topk(3).indices)
    p = q[0, 0]
    for first, second in itertools.permutations(range(V), 2):
        expected = p[first] * p[second] / (1 - p[first])
        share = ((draft.tokens[:, 0] == first) & (draft.tokens[:, 1] == second)).float().mean()
        assert abs(share - expected) < 5 * math.sqrt(expected / B)
    assert draft.probs is not None
    assert torch.allclose(draft.probs.sum(-1), torch.ones(B, 3))
    assert (draft.probs[:, 2].gather(1, draft.tokens[:, :2]) == 0).all()
    assert torch.allclose(draft.probs[:, 0], q[:, 0])


def test_branches_sample_with_uniforms_of_their_own():
    V = 400
    q = torch.full((50, V + 1, V), 1 / V)
    for shape in (StaticTree(make_k_ary(2, 2)), DynamicTree(6, 2, 2)):
        draft, _ = grown(shape, "without-replacement", q)
        parents = draft.tree.parents.expand(50, -1)
        one = draft.tokens[parents[:, 1:] == 1].view(50, 2)
        other = draft.tokens[parents[:, 1:] == 2].view(50, 2)
        assert (one == other).float().mean() < 0.05
    again, _ = grown(StaticTree(make_k_ary(2, 2)), "without-replacement", q, step=2)
    assert (again.tokens == grown(StaticTree(make_k_ary(2, 2)), "without-replacement", q)[0].tokens).float().mean() < 0.05


def test_coupled_children_hold_what_the_noise_of_the_image_samples():
    """Where the drafter is the target, the first child is always the token; the second of log p + G is the next."""
    q = table(30, 9, seed=2)
    draft, _ = grown(StaticTree(make_k_ary(2, 2)), "shared-noise", q)
    ratio = q[:, 9] / sample_exponential(torch.arange(30), torch.full((30, 1), 5), 9)[:, 0]
    assert torch.equal(draft.tokens[:, :2], ratio.topk(2).indices)


def test_what_lies_past_the_grid_is_not_valid():
    draft, _ = grown(DynamicTree(7, 3, 3), "without-replacement", table(4, 6), total=7)
    assert draft.valid is not None
    assert torch.equal(draft.valid, draft.tree.depth[:, 1:] <= 2)


# -- bad input ------------------------------------------------------------------------------------------------------------


def test_trees_that_a_model_cannot_take_are_refused_before_a_pass():
    model = TableModel(vocab=3, tokens=4)
    model.draft_model = TableModel(vocab=3, tokens=4)
    for drafter, message in [
        (SpeculativeTree(DynamicTree(4, 4, 2)), "depth of a tree must be from 1 to 3"),
        (SpeculativeTree(DynamicTree(4, 2, 4)), "at most the vocabulary of 3 tokens, got 4"),
        (JacobiTree((-1, 0, 0, 0, 0)), "at most the vocabulary of 3 tokens, got 4"),
        (JacobiTree((-1, 0, 1, 2, 3)), "depth of a tree must be from 1 to 3"),
        (SpeculativeTree(DynamicTree(4, 2, 2), model=TableModel(vocab=4, tokens=4)), "share the target's vocabulary"),
    ]:
        rule = recursive_rejection
        with pytest.raises(ValueError, match=message):
            decode(model, torch.zeros(1, dtype=torch.int64), torch.arange(1), Accelerator(drafter=drafter, acceptance=rule))
    assert model.passes == []


# -- on a device ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("child_sampling,rules", [
    ("without-replacement", [recursive_rejection, traversal, shared_noise]), ("with-replacement", [k_seq]),
    ("top-k", [recursive_rejection]),
    ("shared-noise", [shared_noise]),
])  # fmt: skip
def test_nothing_is_read_from_the_device(child_sampling, rules):
    """Tensors of the meta device hold no values: whatever read one would raise."""
    B, V, place = 3, 9, torch.device("meta")
    seeds, length = torch.zeros(B, dtype=torch.int64, device=place), torch.ones(B, 1, dtype=torch.int64, device=place)
    q, image = torch.empty(B, V + 1, V, device=place), torch.arange(B, device=place)[:, None]
    noise = Noise(seeds, length, 1)
    if child_sampling == "with-replacement":
        tree = Tree.batched(torch.zeros(B, 6, dtype=torch.int64, device=place), 3, 2)
        draft = Draft(torch.zeros(B, 5, dtype=torch.int64, device=place), tree, torch.empty(B, 5, V, device=place))
    else:
        draft = grow_tree(lambda frontier: q[image, frontier.tokens], DynamicTree(6, 3, 3), child_sampling, seeds, noise, 100)
    probs = torch.empty(B, draft.tokens.shape[1] + 1, V, device=place)
    for rule in rules:
        verdict = rule(probs, draft, Noise(seeds, length + draft.tree.depth, 1), torch.zeros(B, device=place))
        assert verdict.next_token.shape == (B,)
    rejects(lambda: int(verdict.count[0]), "meta", RuntimeError)

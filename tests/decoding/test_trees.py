"""Trees: shapes, growth on the device, what statistics say of siblings, and bad input."""

import itertools

import pytest
import torch

from vargen.decoding import Accelerator, Draft, DynamicTree, Noise, Tree, decode, shared_noise, traversal
from vargen.decoding.experimental import JacobiTree, SampledTree, SpeculativeTree, k_seq, recursive_rejection
from vargen.decoding.experimental.eagle_children import SharedNoise, TopK
from vargen.decoding.tree_drafters import Children, Frontier, grow_tree
from vargen.kernels.noise_bits import sample_exponential
from vargen.verify.tables import TableModel

COMPLETE = DynamicTree(6, 2, 2)


def two_models(vocab: int, tokens: int, **options) -> TableModel:
    model = TableModel(vocab, tokens, **options)
    model.draft_model = TableModel(vocab, tokens, **options)
    return model


def test_trees_have_the_shape_that_they_are_said_to_have():
    model = two_models(vocab=5, tokens=20)
    for nodes, depth, children, parents in [
        (7, 1, 2, [-1, 0, 0, 1, 3, 4, 5, 6]), (6, 2, 2, [-1, 0, 0, 1, 1, 2, 2]), (8, 2, 2, [-1, 0, 0, 1, 1, 2, 2, 3, 7]),
        (3, 3, 1, [-1, 0, 1, 2]), (4, 1, 3, [-1, 0, 0, 0, 1]),
    ]:  # fmt: skip
        assert JacobiTree(nodes, depth, children).bind(model, 1).tree.parents.tolist() == parents
    for branching, parents in {(2, 2): [-1, 0, 0, 1, 1, 2, 2], (3, 1): [-1, 0, 0, 0, 1, 2, 3], (1, 1): [-1, 0, 1]}.items():
        drafter = SampledTree(branching=branching)
        assert drafter.bind(model, 1).levels[-1].parents.tolist() == parents and drafter.width == len(parents)
    small = two_models(vocab=9, tokens=5)
    assert JacobiTree(23, 2, 2).bind(small, 1).tree is JacobiTree(8, 2, 2).bind(small, 1).tree
    assert DynamicTree(14, 3, 2, frontier=4).limit(2, 9) == DynamicTree(6, 2, 2, frontier=4)
    assert DynamicTree(12, 2, 3, frontier=3).limit(9, 2) == DynamicTree(6, 2, 2, frontier=3)
    assert DynamicTree().limit(9, 9) == DynamicTree()


@pytest.mark.parametrize(
    "drafter",
    [JacobiTree(23, 2, 4), SpeculativeTree(DynamicTree(9, 6, 5)), SampledTree(branching=(4, 2, 1))],
    ids=["jacobi", "dynamic", "with replacement"],
)
def test_a_tree_is_limited_to_the_grid_and_the_vocabulary(drafter):
    method = Accelerator(drafter=drafter, acceptance=recursive_rejection)
    for tokens, vocab in itertools.product(range(1, 9), (1, 2, 5)):
        model = two_models(vocab, tokens)
        assert drafter.bind(model, 2).width <= drafter.width
        assert decode(model, torch.zeros(2, dtype=torch.int64), torch.arange(2), method).finished


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


def grown(shape, children, q, step=1, total=1000):
    B, V = len(q), q.shape[-1]
    image = torch.arange(B)[:, None]
    root = torch.full((B,), V)
    frontiers = []

    def expand(frontier: Frontier):
        frontiers.append(frontier)
        assert torch.equal(frontier.expanded_tokens[:, -frontier.tokens.shape[1] :], frontier.tokens)
        return q[image, frontier.tokens]

    noise, rates = Noise(torch.arange(B), torch.full((B, 1), 5), step), torch.tensor(shape.conditional_rates)
    return grow_tree(expand, shape, children, rates, root, noise, total), frontiers


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
    draft, frontiers = grown(DynamicTree(N, D, K), TopK(), q)
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


@pytest.mark.parametrize("children", [TopK(), Children(), SharedNoise()], ids=lambda each: type(each).__name__)
def test_ties_never_part_a_child_from_its_parent(children):
    """Certain tokens, and tokens that are all alike: children are worth as much as their parents."""
    V = 6
    certain = torch.nn.functional.one_hot((torch.arange(V + 1) + 1) % V, V).float().expand(3, -1, -1)
    even = torch.full((3, V + 1, V), 1 / V)
    for q in (certain, even, torch.cat([certain[:1], even[:2]])):
        for nodes in (3, 7, 12):
            draft, _ = grown(DynamicTree(nodes, 4, 3), children, q)
            assert draft.valid is not None
            parents = draft.tree.parents
            assert (parents[:, 1:] < torch.arange(1, nodes + 1)).all() and (parents[:, 1:] >= 0).all()
            above = torch.nn.functional.pad(draft.valid, (1, 0), value=True).gather(1, parents[:, 1:])
            assert (above | ~draft.valid).all(), "what follows an invalid slot is invalid"
    draft, _ = grown(DynamicTree(4, 4, 3), TopK(), certain)
    assert draft.valid is not None and draft.valid.all(), "the certain chain, and none of what has no probability"
    assert draft.tree.parents[0].tolist() == [-1, 0, 1, 2, 3]


def test_coupled_children_hold_what_the_noise_of_the_image_samples():
    """Where the drafter is the target, the first child is always the token; the second of log p + G is the next."""
    q = table(30, 9, seed=2)
    draft, _ = grown(COMPLETE, SharedNoise(), q)
    ratio = q[:, 9] / sample_exponential(torch.arange(30), torch.full((30, 1), 5), 9)[:, 0]
    assert torch.equal(draft.tokens[:, :2], ratio.topk(2).indices)


def test_what_lies_past_the_grid_is_not_valid():
    draft, _ = grown(DynamicTree(7, 3, 3), Children(), table(4, 6), total=7)
    assert draft.valid is not None
    assert torch.equal(draft.valid, draft.tree.depth[:, 1:] <= 2)


# -- rules on trees ----------------------------------------------------------------------------------------------------


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

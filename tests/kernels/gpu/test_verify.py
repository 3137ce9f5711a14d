"""Acceptance in one launch against the rules of `vargen.decoding.rules`, which are proved exact elsewhere: of
the same probabilities, draft and noise the same verdict."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vargen.decoding import Draft, Tree
from vargen.decoding.noise import Noise
from vargen.decoding.relaxed_rules import GroupedRule, NeighborhoodRule
from vargen.decoding.rules import shared_noise, speculative_sampling
from vargen.decoding.tree import Verdict
from vargen.decoding.tree_rules import traversal
from vargen.kernels.triton.verification import verify_chain, verify_shared_noise, verify_traversal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("canaries")


class Case:
    """Probabilities, a draft of which about half is accepted, and noise."""

    def __init__(self, tree: Tree, B: int, V: int, *, drawn: bool, valid: bool, seed: int):
        generator = torch.Generator().manual_seed(seed)
        T = tree.parents.shape[-1]
        self.probs = (torch.randn(B, T, V, generator=generator) * (1.5 if drawn else 4.0)).softmax(-1)
        parents = tree.parents[..., 1:].clamp(min=0).expand(B, T - 1)
        likely = self.probs.gather(1, parents[..., None].expand(-1, -1, V))
        q = (likely.log() + torch.randn(B, T - 1, V, generator=generator)).softmax(-1)
        tokens = torch.zeros(B, 0, dtype=torch.int64)
        if T > 1:
            tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(B, T - 1)
        if not drawn:  # the likeliest of each slot, by rank
            order = likely.argsort(-1, descending=True)
            rank = tree.sibling_rank[..., 1:].expand(B, T - 1)
            tokens = order.gather(2, rank[..., None])[..., 0]
        marks = torch.rand(B, T - 1, generator=generator) < 0.8 if valid else None
        self.draft = Draft(tokens, tree, q if drawn else None, marks)
        seeds = torch.randint(-(2**62), 2**62, (B,), generator=generator)
        steps = torch.randint(1, 40, (B,), generator=generator)  # images that did not start together are in other passes
        self.noise = Noise(seeds, torch.randint(0, 500, (B, 1), generator=generator) + tree.depth, steps)

    def there(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
        """probs, tokens, q, valid, seeds, position on the device of the kernels."""
        seeds, position = self.noise.key
        strided = torch.stack([seeds, seeds + 1], 1).to(DEVICE)[:, 0]  # kernels take seeds of any stride
        given = (self.probs, self.draft.tokens, self.draft.probs, self.draft.valid, strided, position)
        return tuple(None if each is None else each.to(DEVICE) for each in given)  # type: ignore[return-value]


def random_tree(T: int, B: int | None, seed: int) -> Tree:
    generate = random.Random(seed)

    def parents() -> tuple[int, ...]:
        found = [-1]
        while len(found) < T:
            found.append(generate.randrange(max(0, len(found) - 5), len(found)))
        return tuple(found)

    if B is None:
        return Tree.from_parents(parents())
    return Tree.batched(torch.tensor([parents() for _ in range(B)]), T, T)


TREES: dict[str, Callable[[int], Tree]] = {
    "root alone": lambda B: Tree.make_chain(0),
    "chain": lambda B: Tree.make_chain(6),
    "fan": lambda B: Tree.from_parents((-1, 0, 0, 0, 0, 0)),
    "one for all": lambda B: random_tree(13, None, 3),
    "one for each": lambda B: random_tree(9, B, 4),
}


def check(verdict: Verdict, count: Tensor, next_token: Tensor, path: Tensor | None = None) -> None:
    assert torch.equal(count.cpu(), verdict.count)
    assert torch.equal(next_token.cpu(), verdict.next_token)
    if path is not None:
        for got, expected, n in zip(path.cpu(), verdict.path, verdict.count.tolist(), strict=True):
            assert torch.equal(got[:n], expected[:n])


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize(("T", "V"), [(1, 30), (2, 30), (9, 1000), (33, 100), (4, 4096)])
def test_chains_are_verified_as_by_the_exact_rule(T: int, V: int, drawn: bool, valid: bool) -> None:
    accepted = set()
    for seed in range(3):
        case = Case(Tree.make_chain(T - 1), 4, V, drawn=drawn, valid=valid, seed=seed)
        expected = speculative_sampling(case.probs, case.draft, case.noise, torch.zeros(4))
        probs, tokens, q, marks, seeds, position = case.there()
        got = verify_chain(probs, tokens, q, marks, seeds, position)
        check(expected, got[0], got[1])
        accepted |= set(expected.count.tolist())
    assert T == 1 or len(accepted) > 1, "this case tests one outcome alone"


def relaxed_rules() -> list[GroupedRule | NeighborhoodRule]:
    codes = torch.nn.functional.normalize(torch.randn(200, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    near = torch.cdist(codes, codes).fill_diagonal_(9).argsort(1)[:, :40].short()
    rules: list[GroupedRule | NeighborhoodRule] = [
        GroupedRule(),
        GroupedRule(size=1, delta=0.01),
        GroupedRule(size=15, distance=1.5),
    ]
    rules += [
        NeighborhoodRule(),
        NeighborhoodRule(size=40, ratio=None, delta=0.1),
        NeighborhoodRule(size=33, ratio=2.0, delta=0.05),
    ]
    for rule in rules:
        if isinstance(rule, GroupedRule):
            object.__setattr__(rule, "codebook", codes)
        else:
            object.__setattr__(rule, "neighbor_table", near[:, : rule.size].contiguous())
    return rules


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("drawn", [True, False])
def test_relaxed_rules_accept_as_in_torch(number: int, drawn: bool) -> None:
    rule = relaxed_rules()[number]
    case = Case(Tree.make_chain(5), 3, 200, drawn=drawn, valid=True, seed=number)
    case.probs[0, 2, 50:] = 0  # as filters leave it
    case.probs[0, 2] /= case.probs[0, 2].sum()
    probs, tokens, q, marks, seeds, position = case.there()
    for budget, tightening in ((None, 0.0), (0.5, 0.3)):
        limited = replace(rule, budget=budget, tightening=tightening)
        for name in ("codebook", "neighbor_table"):
            if hasattr(rule, name):
                object.__setattr__(limited, name, getattr(rule, name))
        spent = torch.tensor([0.0, 0.2, 0.6])
        expected = limited(case.probs, case.draft, case.noise, spent)
        accept_prob = limited.accept_prob(case.probs[:, :-1], case.draft.probs, case.draft.tokens).to(DEVICE)
        limits = {"relaxation": spent.to(DEVICE), "budget": budget, "tightening": tightening}
        got = verify_chain(probs, tokens, q, marks, seeds, position, accept_prob=accept_prob, **limits)  # type: ignore[arg-type]
        check(expected, got[0], got[1])
        assert expected.relaxation is not None and got[2] is not None
        torch.testing.assert_close(got[2].cpu(), expected.relaxation, atol=1e-5, rtol=0)


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("name", TREES)
def test_trees_are_verified_by_traversal(name: str, drawn: bool, valid: bool) -> None:
    for seed in range(2):
        case = Case(TREES[name](3), 3, 60, drawn=drawn, valid=valid, seed=seed)
        tree = case.draft.tree
        expected = traversal(case.probs, case.draft, case.noise, torch.zeros(3))
        probs, tokens, q, marks, seeds, position = case.there()
        tables = (each.to(DEVICE) for each in (tree.children, tree.parents, tree.depth, tree.postorder))
        got = verify_traversal(probs, tokens, q, marks, *tables, tree.max_path, seeds, position)
        check(expected, got[1], got[2], got[0])


@pytest.mark.parametrize("name", TREES)
def test_trees_are_verified_with_shared_noise(name: str) -> None:
    """Equal siblings are accepted once; drafts that are no match end the path."""
    for seed in range(4):
        case = Case(TREES[name](3), 3, 4, drawn=True, valid=False, seed=seed)  # of so few tokens that many agree
        tree = case.draft.tree
        expected = shared_noise(case.probs, case.draft, case.noise, torch.zeros(3))
        assert expected.sampled is not None
        got = verify_shared_noise(
            expected.sampled.to(DEVICE), case.draft.tokens.to(DEVICE), tree.children.to(DEVICE), tree.max_path
        )
        check(expected, got[1], got[2], got[0])


@pytest.mark.parametrize("V", [8192, 16384])
def test_whole_vocabularies(V: int) -> None:
    case = Case(Tree.from_parents((-1, 0, 0, 1)), 1, V, drawn=True, valid=False, seed=V)
    probs, tokens, q, marks, seeds, position = case.there()
    tree, nothing = case.draft.tree, torch.zeros(1)
    tables = (each.to(DEVICE) for each in (tree.children, tree.parents, tree.depth, tree.postorder))
    got = verify_traversal(probs, tokens, q, marks, *tables, tree.max_path, seeds, position)
    check(traversal(case.probs, case.draft, case.noise, nothing), got[1], got[2], got[0])

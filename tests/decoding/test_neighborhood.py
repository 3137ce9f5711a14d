"""The neighborhood rule: its neighbor table, its greedy form, and the residuals of released code, which are found."""

import dataclasses
import math

import pytest
import torch
from table_methods import RELAXED_RULES, bind_rule, codebook, random_probs

from vargen.decoding import Accelerator, Draft, Jacobi, NeighborhoodRule, Noise, Sampling, Tree, decode
from vargen.decoding.experimental import JacobiTree
from vargen.decoding.neighbors import build_neighbor_table
from vargen.evaluation.table_models import TableModel
from vargen.files import cache_folder

GREEDY = Sampling(temperature=0.0)


def greedily_accepted(soft, token, near, ratio, delta):
    """LANTERN's greedy form for one draft, by its words: what is nearest is added up to the bounds; is the sum the largest?"""
    own, counted, total = soft[token], 0.0, 0.0
    for other in near:
        total += soft[other]
        if total > (math.inf if ratio is None else (ratio - 1) * own) or total > (math.inf if delta is None else delta):
            break
        counted = total
    return own > 0 and own + counted >= max(p for other, p in enumerate(soft) if other != token)


@pytest.mark.parametrize("rule", [each for name, each in RELAXED_RULES.items() if "neighborhood" in name], ids=str)
@pytest.mark.parametrize("tree", [Tree.make_chain(4), Tree.from_parents((-1, 0, 0, 1, 1))], ids=["chain", "tree"])
def test_greedy_neighbourhoods_ask_whether_the_draft_would_be_the_likeliest(rule, tree):
    rule = bind_rule(rule, 9)
    soft = random_probs(400 * 5, 9, True).unbind(1)[0].unflatten(0, (400, 5))
    hard = torch.nn.functional.one_hot(soft.argmax(-1), 9).double()
    tokens = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(i))[:4] for i in range(400)])
    q = torch.nn.functional.one_hot(tokens, 9).double()
    noise = Noise(torch.arange(400), 7 + tree.depth.expand(400, -1), 3)
    is_greedy = torch.arange(400) % 3 > 0
    draft, nothing = Draft(tokens, tree, q, unfiltered_probs=soft), torch.zeros(400)
    verdict = rule(hard, dataclasses.replace(draft, is_greedy=is_greedy | True), noise, nothing)
    mixed, sampled = (rule(hard, dataclasses.replace(draft, is_greedy=each), noise, nothing) for each in (is_greedy, None))
    for part in ("count", "next_token", "relaxation"):
        expected = torch.where(is_greedy, getattr(verdict, part), getattr(sampled, part))
        assert torch.equal(getattr(mixed, part), expected)
    near, plain, loosened = rule.neighbor_table.tolist(), soft.tolist(), 0
    for i in range(400):
        path, spent, kept = [0], 0, True
        while kept:
            kept = False
            for slot in (t for t in range(1, 5) if tree.parents[t] == path[-1]):
                token, row = tokens[i, slot - 1].item(), plain[i][path[-1]]
                if greedily_accepted(row, token, near[token], rule.ratio, rule.delta):
                    spent += row[token] < max(row)
                    path.append(slot)
                    kept = True
                    break
        loosened += spent
        assert verdict.path[i, : verdict.count[i]].tolist() == path
        assert verdict.relaxation[i] == spent
        assert verdict.next_token[i] == soft[i, path[-1]].argmax()
    assert loosened > 20


@pytest.mark.parametrize("drafter", [Jacobi(8), JacobiTree(7, 2, 2)], ids=["chain", "tree"])
def test_greedy_images_are_those_of_ar_but_for_what_the_budget_allows(drafter):
    model = TableModel(vocab=9, tokens=40, seed=6)
    model.codebook = codebook(9)
    arguments = (model, torch.zeros(16, dtype=torch.int64), torch.arange(16))
    sequential = decode(*arguments, "ar", GREEDY).tokens
    for budget in (0.0, 3.0, None):
        rule = NeighborhoodRule(size=4, ratio=3.0, budget=budget)
        generated = decode(*arguments, Accelerator(drafter=drafter, acceptance=rule), GREEDY)
        other = (generated.tokens != sequential).any(1)
        assert other.any() == (budget != 0)
        assert all(spent <= (math.inf if budget is None else budget) for spent in generated.stats.relaxation)
        assert not other[torch.tensor(generated.stats.relaxation) == 0].any()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache folder, and nothing remembered in this process."""
    from vargen.decoding import neighbors as neighbours

    monkeypatch.setenv("VARGEN_CACHE", str(tmp_path))
    neighbours._load_or_build.cache_clear()
    yield tmp_path / "neighbours"
    neighbours._load_or_build.cache_clear()


@pytest.mark.parametrize("count", [1, 5, 200])
def test_neighbours_are_the_nearest_codes_without_the_token_itself(count, own_cache):
    book = codebook(60)
    book[7] = book[3]  # alike: each is the other's nearest, and neither its own
    table = build_neighbor_table(book, count)
    assert table.dtype == torch.int32 and table.shape == (60, min(count, 59))
    for token in range(60):
        gap = [((book[token] - book[other]).double().square().sum().item(), other) for other in range(60) if other != token]
        assert table[token].tolist() == [other for _, other in sorted(gap)[:count]]
    assert table[7, 0] == 3 and table[3, 0] == 7


def test_a_table_is_made_once_and_kept(own_cache, monkeypatch):
    from vargen.decoding import neighbors as neighbours

    first = build_neighbor_table(codebook(40), 6)
    assert [path.suffix for path in own_cache.iterdir()] == [".npz"]
    neighbours._load_or_build.cache_clear()  # as in another process
    monkeypatch.setattr(neighbours, "_build_table", lambda *_: pytest.fail("made again"))
    assert torch.equal(build_neighbor_table(codebook(40), 6), first)
    assert torch.equal(build_neighbor_table(codebook(40), 2), first[:, :2])  # fewer are the first columns


def test_a_cache_folder_that_cannot_be_written_is_done_without(own_cache, monkeypatch):
    monkeypatch.setenv("VARGEN_CACHE", "/dev/null/nowhere")
    assert cache_folder().parent.name == "null"
    assert build_neighbor_table(codebook(20), 3).shape == (20, 3)


def test_a_neighbourhood_is_the_longest_prefix_within_its_bounds():
    p, _ = random_probs(50, 12, True).unbind(1)
    rule = bind_rule(NeighborhoodRule(size=7, ratio=3.0, delta=0.3), 12)
    tokens = torch.arange(50)[:, None] % 12
    found = rule.neighbor_prob(p[:, None], tokens)[:, 0]
    for image in range(50):
        token, mass = image % 12, 0.0
        for other in rule.neighbor_table[token].tolist():
            if mass + p[image, other] > min(0.3, 2.0 * p[image, token]):
                break
            mass += p[image, other]
        assert abs(found[image] - mass) < 1e-12

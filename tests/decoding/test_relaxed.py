"""Relaxed rules: what one step costs is exactly the acceptance that they grant, report and cap; wrong residuals cost
more."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from one_step import Coins, one_step, random_probs

from vargen.decoding import (
    Accelerator,
    Draft,
    DynamicTree,
    GroupedRule,
    Jacobi,
    JacobiTree,
    NeighborhoodRule,
    Noise,
    PooledRule,
    RatioRule,
    Sampling,
    Speculative,
    SpeculativeTree,
    StaticTree,
    Tree,
    TypicalRule,
    decode,
    speculative_sampling,
)
from vargen.decoding.next_token.acceptance import RelaxedRule, Siblings, acceptance_rule
from vargen.decoding.next_token.acceptance.neighborhood import build_neighbor_table
from vargen.decoding.next_token.trees.shapes import make_k_ary
from vargen.decoding.noise import Purpose
from vargen.evaluation.exactness import CASES, measure
from vargen.evaluation.table_models import TableModel
from vargen.files import cache_folder


def codes(vocab: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(vocab, 4, generator=torch.Generator().manual_seed(seed))


def bound(rule: RelaxedRule, vocab: int) -> RelaxedRule:
    model = TableModel(vocab=vocab, tokens=4)
    model.codebook = codes(vocab)
    return rule.bind(model)


RULES = {
    "grouped": GroupedRule(size=4, delta=1.0),
    "neighbourhood, by ratio": NeighborhoodRule(size=4, ratio=3.0),
    "neighbourhood, by delta": NeighborhoodRule(size=8, ratio=None, delta=0.5),
    "neighbourhood, by both": NeighborhoodRule(size=3, ratio=4.0, delta=0.2),
    "typical": TypicalRule(epsilon=0.5, alpha=0.6),
    "ratio": RatioRule(2.0),
    "pooled": PooledRule(size=2, threshold=0.5),
}


ON_TREES = {name: rule for name, rule in RULES.items() if "tree" in rule.topologies}


def total_variation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs().sum(1) / 2


# -- the law of one step, by enumeration ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("zeros", [False, True])
def test_one_step_is_as_far_from_the_target_as_it_grants_acceptance(rule, zeros):
    p, q = random_probs(64, 9, zeros).unbind(1)
    output, chance = one_step(bound(rule, 9), p, q)
    extra = (q * chance).sum(1) - torch.minimum(p, q).sum(1)
    assert torch.allclose(output.sum(1), torch.ones(64, dtype=torch.float64))
    assert (total_variation(output, p) - extra).abs().max() < 1e-9
    assert extra.min() > -1e-12 and extra.max() > 0.05


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_is_reported_is_what_one_step_costs(rule):
    """The mean over drafts of the reported relaxation, without enumerating coins: a draft is examined whatever they are."""
    p, q = random_probs(64, 9, True).unbind(1)
    rule = bound(rule, 9)
    output, _ = one_step(rule, p, q)
    reported = torch.zeros(64, dtype=torch.float64)
    for d in range(9):
        draft = Draft(torch.full((64, 1), d), Tree.make_chain(1), q[:, None])
        verdict = rule(p[:, None].expand(-1, 2, -1), draft, Coins(0.5, 64, 2), torch.zeros(64))
        reported += q[:, d] * verdict.relaxation
    assert (total_variation(output, p) - reported).abs().max() < 1e-9


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_deterministic_drafts_obey_the_same_law(rule):
    p, _ = random_probs(64, 9, False).unbind(1)
    rule = bound(rule, 9)
    draft = Draft(torch.full((64, 1), 3), Tree.make_chain(1))
    one_hot = torch.zeros_like(p).index_fill_(1, torch.tensor([3]), 1.0)
    output, chance = one_step(rule, p, one_hot)
    verdict = rule(p[:, None].expand(-1, 2, -1), draft, Coins(0.5, 64, 2), torch.zeros(64))
    assert (total_variation(output, p) - (chance[:, 3] - p[:, 3])).abs().max() < 1e-9
    assert torch.allclose(verdict.relaxation, chance[:, 3] - p[:, 3], atol=1e-9)


def with_residual(make):
    """The neighbourhood rule, refusing into `make(p, q, tokens, A, size nearest)`, where A is what counted for the draft."""
    rule = bound(NeighborhoodRule(size=4, ratio=3.0), 9)

    @acceptance_rule(exact=False)
    def wrong(probs, draft, noise, relaxation):
        verdict = rule(probs, draft, noise, relaxation)
        p, near = probs[:, 0], rule.neighbor_table[draft.tokens[:, 0]].long()
        mass = p.gather(1, near).cumsum(1)
        counted = mass <= 2.0 * p.gather(1, draft.tokens)
        left = make(p, draft.probs[:, 0], draft.tokens, near, counted)
        return dataclasses.replace(verdict, next_token=noise.at(None).sample(left[:, None], Purpose.RESIDUAL)[:, 0])

    return wrong


def neighbours_stay(p, q, tokens, near, counted):
    """LANTERN's static trees: neighbours are taken from q instead of p, so they keep all of their mass."""
    return (p - q.scatter(1, near, q.gather(1, near) * ~counted)).clamp(min=0)


def all_nearest_go(p, q, tokens, near, counted):
    """LANTERN's dynamic trees: all the k nearest lose their mass as soon as one of them counted, not those that did."""
    gone = p.scatter(1, near, p.gather(1, near) * ~counted.any(1, keepdim=True))
    left = (gone - q).clamp(min=0)
    return torch.where(left.sum(1, keepdim=True) > 0, left, p)


def anything(p, q, tokens, near, counted):
    """LANTERN, where nothing is left: the whole vocabulary alike."""
    return torch.ones_like(p)


@pytest.mark.parametrize("wrong", [neighbours_stay, all_nearest_go, anything])
def test_the_law_tells_the_residuals_of_released_code(wrong):
    p, q = random_probs(64, 9, False).unbind(1)
    output, chance = one_step(with_residual(wrong), p, q)
    extra = (q * chance).sum(1) - torch.minimum(p, q).sum(1)
    above = total_variation(output, p) - extra
    assert above.min() > -1e-9  # no residual costs less than the optimal one
    assert above.max() > 1e-2


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_draft_refused_by_rounding_alone_is_redrawn_from_the_target(rule):
    p, _ = random_probs(16, 9, True).unbind(1)
    coins = Coins(1e300, 16, 2)
    bound(rule, 9)(
        p[:, None].expand(-1, 2, -1), Draft(torch.zeros(16, 1).long(), Tree.make_chain(1), p[:, None]), coins, p[:, 0]
    )
    assert torch.equal(coins.drawn_from[0][:, 0], p)


def test_a_bound_of_the_mass_is_none_of_the_distance():
    """LANTERN's delta limits each draft's own modification; the sum over drafts is what is reported, and is larger."""
    p, q = random_probs(64, 30, False).unbind(1)
    output, _ = one_step(bound(NeighborhoodRule(size=29, ratio=None, delta=0.05), 30), p, q)
    assert total_variation(output, p).max() > 0.1


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [*RULES.values(), RatioRule(3.0, tightening=0.7), GroupedRule(4, 1.0, tightening=1.0)], ids=str
)
@pytest.mark.parametrize("drafter", [Jacobi(4, "maximal"), Speculative(3)], ids=["jacobi", "small model"])
def test_pictures_are_no_further_from_the_target_than_was_reported(rule, drafter):
    case = CASES[0]
    method = Accelerator(drafter=drafter, acceptance=rule)
    finding = measure(method, case.model(), case.sampling, 60_000)
    seeds = torch.arange(20_000) + 10**6
    spent = decode(case.model(), torch.zeros(20_000, dtype=torch.int64), seeds, method, case.sampling).stats.relaxation
    assert finding.impossible == 0 and finding.times_the_floor > 2
    assert finding.distance < sum(spent) / len(spent) + 2 * finding.floor


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("budget", [0.0, 0.7])
def test_no_rule_spends_more_than_its_budget(rule, budget):
    model = TableModel(vocab=9, tokens=40, seed=6)
    model.codebook = codes(9)
    arguments = (model, torch.zeros(64, dtype=torch.int64), torch.arange(64))
    capped = dataclasses.replace(rule, budget=budget)
    spent = decode(*arguments, Accelerator(drafter=Jacobi(8), acceptance=capped))
    free = decode(*arguments, Accelerator(drafter=Jacobi(8), acceptance=rule))
    assert max(spent.stats.relaxation) <= budget + 1e-5
    assert sum(free.stats.relaxation) / 64 > 1.0  # the budgets do bind
    if budget == 0:
        assert torch.equal(
            spent.tokens, decode(*arguments, Accelerator(drafter=Jacobi(8), acceptance=speculative_sampling)).tokens
        )


# -- greedy child_sampling ---------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("rule", [each for name, each in RULES.items() if "neighbourhood" in name], ids=str)
@pytest.mark.parametrize("tree", [Tree.make_chain(4), Tree.from_parents((-1, 0, 0, 1, 1))], ids=["chain", "tree"])
def test_greedy_neighbourhoods_ask_whether_the_draft_would_be_the_likeliest(rule, tree):
    rule = bound(rule, 9)
    soft = random_probs(400 * 5, 9, True).unbind(1)[0].unflatten(0, (400, 5))
    hard = torch.nn.functional.one_hot(soft.argmax(-1), 9).double()
    tokens = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(i))[:4] for i in range(400)])
    q = torch.nn.functional.one_hot(tokens, 9).double()
    noise = Noise(torch.arange(400), 7 + tree.depth.expand(400, -1), 3)
    verdict = rule(hard, Draft(tokens, tree, q, unfiltered_probs=soft), noise, torch.zeros(400))
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


@pytest.mark.parametrize("drafter", [Jacobi(8), JacobiTree((-1, 0, 0, 1, 2, 3), "maximal")], ids=["chain", "tree"])
def test_greedy_pictures_are_those_of_ar_but_for_what_the_budget_allows(drafter):
    model = TableModel(vocab=9, tokens=40, seed=6)
    model.codebook = codes(9)
    arguments = (model, torch.zeros(16, dtype=torch.int64), torch.arange(16))
    sequential = decode(*arguments, "ar", GREEDY).tokens
    for budget in (0.0, 3.0, None):
        rule = NeighborhoodRule(size=4, ratio=3.0, budget=budget)
        drawn = decode(*arguments, Accelerator(drafter=drafter, acceptance=rule), GREEDY)
        other = (drawn.tokens != sequential).any(1)
        assert other.any() == (budget != 0)
        assert all(spent <= (math.inf if budget is None else budget) for spent in drawn.stats.relaxation)
        assert not other[torch.tensor(drawn.stats.relaxation) == 0].any()


# -- trees ------------------------------------------------------------------------------------------------------------

TREES = {
    "drawn without replacement": SpeculativeTree(StaticTree((-1, 0, 0, 1, 1, 2, 4)), "without-replacement"),
    "drawn independently": SpeculativeTree(StaticTree(make_k_ary(2, 2)), "with-replacement"),
    "the likeliest, dynamic": SpeculativeTree(DynamicTree(nodes=5, depth=3, children=2), "top-k"),
    "of a window": JacobiTree((-1, 0, 0, 1, 2, 3), "maximal"),
}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", TREES.values(), ids=TREES)
@pytest.mark.parametrize("rule", [RULES["grouped"], RULES["neighbourhood, by both"], RatioRule(2.0, tightening=0.7)], ids=str)
def test_pictures_of_trees_are_no_further_from_the_target_than_was_reported(rule, drafter):
    case = CASES[1]
    method = Accelerator(drafter=drafter, acceptance=rule)
    finding = measure(method, case.model(), case.sampling, 30_000)
    seeds = torch.arange(10_000) + 10**6
    spent = decode(case.model(), torch.zeros(10_000, dtype=torch.int64), seeds, method, case.sampling).stats.relaxation
    assert finding.impossible == 0
    assert finding.distance < sum(spent) / len(spent) + 2 * finding.floor
    strict = dataclasses.replace(method, acceptance=dataclasses.replace(rule, budget=0.0))
    nothing = measure(strict, case.model(), case.sampling, 30_000)
    assert nothing.exact and finding.distance > nothing.distance + 2 * nothing.floor


@pytest.mark.parametrize("rule", ON_TREES.values(), ids=ON_TREES)
@pytest.mark.parametrize("budget", [None, 0.4])
def test_a_walk_over_a_tree_that_is_a_chain_judges_as_on_the_chain(rule, budget):
    p, q = random_probs(500 * 5, 9, True).float().unflatten(0, (500, 5)).unbind(2)
    noise = Noise(torch.arange(500), torch.arange(5).expand(500, -1), 3)
    tokens = noise.sample(q, Purpose.DRAFT)[:, 1:]
    valid = torch.arange(4) < 2 + torch.arange(500)[:, None] % 3
    chain, walk = Tree.make_chain(4), Tree.batched(torch.arange(-1, 4).expand(500, -1), max_path=5, max_children=1)
    rule, spent = bound(dataclasses.replace(rule, budget=budget, tightening=0.3), 9), torch.linspace(0, 0.5, 500)
    a, b = (rule(p, Draft(tokens, tree, q[:, 1:], valid), noise, spent) for tree in (chain, walk))
    assert torch.equal(a.count, b.count) and (a.count > 2).any()
    assert torch.allclose(a.relaxation, b.relaxation, atol=1e-6)
    assert (a.next_token == b.next_token).float().mean() > 0.99  # one residual sums to one, the other does not: rounding


@pytest.mark.parametrize("rule", ON_TREES.values(), ids=ON_TREES)
def test_no_image_spends_more_than_its_budget_on_trees(rule):
    model = TableModel(vocab=9, tokens=40, seed=6)
    model.codebook = codes(9)
    drafter = SpeculativeTree(StaticTree((-1, 0, 0, 1, 1, 2, 4)), model=TableModel(vocab=9, tokens=40, seed=8))
    arguments = (model, torch.zeros(64, dtype=torch.int64), torch.arange(64))
    capped, free = (
        decode(*arguments, Accelerator(drafter=drafter, acceptance=dataclasses.replace(rule, budget=budget))).stats.relaxation
        for budget in (0.6, None)
    )
    assert max(capped) <= 0.6 + 1e-4 and sum(capped) / 64 > 0.3 and sum(free) / 64 > 0.9


# -- the schedule of Cool-SD ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_tightening_rule_grants_late_drafts_exponentially_less(rule):
    p, q = random_probs(400, 9, False).float().unbind(1)
    probs, drafted = p[:, None].expand(-1, 6, -1), q[:, None].expand(-1, 5, -1)
    draft = Draft(torch.arange(400)[:, None].expand(-1, 5) % 9, Tree.make_chain(5), drafted)
    loose, tight = (bound(dataclasses.replace(rule, tightening=nu), 9) for nu in (0.0, 0.7))
    siblings = Siblings(probs[:, :-1], drafted, draft.tokens, torch.arange(1, 6)[None])
    all_alike, tapered = (rule.relaxation(siblings, draft.tree.depth[1:]) for rule in (loose, tight))
    assert torch.allclose(all_alike, all_alike[:, :1].expand(-1, 5))  # the same draft of the same probabilities
    assert torch.allclose(tapered, all_alike * torch.tensor([math.exp(-0.7 * i) for i in range(5)]))
    assert all_alike.max() > 0.05


def test_a_ratio_that_tightens_falls_towards_one():
    """Granted beyond p / q, ratio w becomes 1 + (w - 1) exp(-nu i): Cool-SD's, but never below the exact rule."""
    p, q = torch.tensor([0.1, 0.9]), torch.tensor([0.6, 0.4])
    drafts = Siblings(p.expand(1, 3, 2), q.expand(1, 3, 2), torch.zeros(1, 3, dtype=torch.int64), torch.arange(1, 4)[None])
    granted = RatioRule(2.0, tightening=0.5).relaxation(drafts, torch.arange(1, 4))
    assert torch.allclose(granted[0] / (0.1 / 0.6), torch.tensor([math.exp(-0.5 * i) for i in range(3)]))


# -- neighbours -------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache folder, and nothing remembered in this process."""
    from vargen.decoding.next_token.acceptance import neighborhood as neighbours

    monkeypatch.setenv("VARGEN_CACHE", str(tmp_path))
    neighbours._load_or_build.cache_clear()
    yield tmp_path / "neighbours"
    neighbours._load_or_build.cache_clear()


@pytest.mark.parametrize("count", [1, 5, 200])
def test_neighbours_are_the_nearest_codes_without_the_token_itself(count, own_cache):
    book = codes(60)
    book[7] = book[3]  # alike: each is the other's nearest, and neither its own
    table = build_neighbor_table(book, count)
    assert table.dtype == torch.int16 and table.shape == (60, min(count, 59))
    for token in range(60):
        gap = [((book[token] - book[other]).double().square().sum().item(), other) for other in range(60) if other != token]
        assert table[token].tolist() == [other for _, other in sorted(gap)[:count]]
    assert table[7, 0] == 3 and table[3, 0] == 7


def test_codes_that_are_all_alike_have_the_same_neighbours_everywhere(own_cache):
    table = build_neighbor_table(torch.ones(50, 3), 4)
    assert table[0].tolist() == [1, 2, 3, 4] and table[2].tolist() == [0, 1, 3, 4] and table[49].tolist() == [0, 1, 2, 3]


def test_large_vocabularies_have_wider_numbers(own_cache):
    book = torch.arange(2**15 + 1.0)[:, None]
    table = build_neighbor_table(book, 1)
    assert table.dtype == torch.int32 and table[-1].item() == 2**15 - 1


def test_a_table_is_made_once_and_kept(own_cache, monkeypatch):
    from vargen.decoding.next_token.acceptance import neighborhood as neighbours

    first = build_neighbor_table(codes(40), 6)
    assert [path.suffix for path in own_cache.iterdir()] == [".npz"]
    neighbours._load_or_build.cache_clear()  # as in another process
    monkeypatch.setattr(neighbours, "_build_table", lambda *_: pytest.fail("made again"))
    assert torch.equal(build_neighbor_table(codes(40), 6), first)
    assert torch.equal(build_neighbor_table(codes(40), 2), first[:, :2])  # fewer are the first columns


@pytest.mark.parametrize("damage", ["another codebook", "cut", "out of range", "too narrow", "not a table"])
def test_a_file_that_is_no_table_of_this_codebook_is_made_anew(damage, own_cache):
    from vargen.decoding.next_token.acceptance import neighborhood as neighbours

    right = build_neighbor_table(codes(40), 6)
    (path,) = own_cache.iterdir()
    with np.load(path) as stored:
        content = dict(stored)
    if damage == "another codebook":
        other = build_neighbor_table(codes(40, seed=8), 6)
        content = {"codebook": neighbours.hash_codebook(codes(40, seed=8)), "nearest": other.numpy()}
    content["nearest"] = {"cut": content["nearest"][:-1], "out of range": content["nearest"] + 40,
                          "too narrow": content["nearest"][:, :5]}.get(damage, content["nearest"])  # fmt: skip
    np.savez(path, **content)
    if damage == "not a table":
        path.write_bytes(b"PK\x03\x04 and no more")
    neighbours._load_or_build.cache_clear()
    assert torch.equal(build_neighbor_table(codes(40), 6), right)
    neighbours._load_or_build.cache_clear()
    assert torch.equal(build_neighbor_table(codes(40), 6), right)  # the file has been put right, too


def test_a_cache_folder_that_cannot_be_written_is_done_without(own_cache, monkeypatch):
    monkeypatch.setenv("VARGEN_CACHE", "/dev/null/nowhere")
    assert cache_folder().parent.name == "null"
    assert build_neighbor_table(codes(20), 3).shape == (20, 3)


def test_a_neighbourhood_is_the_longest_prefix_within_its_bounds():
    p, _ = random_probs(50, 12, True).unbind(1)
    rule = bound(NeighborhoodRule(size=7, ratio=3.0, delta=0.3), 12)
    tokens = torch.arange(50)[:, None] % 12
    found = rule.neighbor_prob(p[:, None], tokens)[:, 0]
    for image in range(50):
        token, mass = image % 12, 0.0
        for other in rule.neighbor_table[token].tolist():
            if mass + p[image, other] > min(0.3, 2.0 * p[image, token]):
                break
            mass += p[image, other]
        assert abs(found[image] - mass) < 1e-12


def test_a_draft_without_probability_is_never_accepted():
    """Filters drop it, or another token is certain there: LANTERN's additive bound accepts it all the same."""
    model = TableModel(vocab=6, tokens=20, seed=6, forced={3: 2, 10: 0, 19: 5})
    model.codebook = codes(6)
    rule = NeighborhoodRule(size=5, ratio=None, delta=1.0)
    accelerator = Accelerator(drafter=Jacobi(6, "maximal"), acceptance=rule)
    result = decode(model, torch.zeros(200, dtype=torch.int64), torch.arange(200), accelerator, Sampling(top_k=3))
    assert (result.tokens[:, [3, 10, 19]] == torch.tensor([2, 0, 5])).all()


def test_a_bound_neighbourhood_is_the_same_method():
    model = TableModel(vocab=12, tokens=4)
    model.codebook = codes(12)
    rule = NeighborhoodRule(size=3)
    assert rule.bind(model) == rule and Accelerator(drafter=Jacobi(4), acceptance=rule).spec()


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "arguments", "message"),
    [
        (NeighborhoodRule, {"size": 0}, "size"),
        (NeighborhoodRule, {"size": 2.5}, "size"),
        (NeighborhoodRule, {"ratio": 1.0}, "ratio"),
        (NeighborhoodRule, {"ratio": float("nan")}, "ratio"),
        (NeighborhoodRule, {"delta": 0.0}, "delta"),
        (NeighborhoodRule, {"delta": 1.5}, "delta"),
        (NeighborhoodRule, {"ratio": None}, "ratio, delta"),
        (NeighborhoodRule, {"budget": -1.0}, "budget"),
        (RatioRule, {"ratio": 0.9}, "ratio"),
        (RatioRule, {"ratio": "2"}, "ratio"),
        (TypicalRule, {"epsilon": 0.0}, "epsilon"),
        (TypicalRule, {"epsilon": 1.1}, "epsilon"),
        (TypicalRule, {"alpha": 0.0}, "alpha"),
        (TypicalRule, {"budget": float("inf")}, "budget"),
        (RatioRule, {"tightening": -0.1}, "tightening"),
        (GroupedRule, {"tightening": float("inf")}, "tightening"),
    ],
)
def test_bad_parameters_are_named(rule, arguments, message):
    with pytest.raises(ValueError, match=message):
        rule(**arguments)


def test_neighbourhoods_need_a_codebook_of_the_vocabulary():
    model = TableModel(vocab=4, tokens=9)
    with pytest.raises(ValueError, match="codebook"):
        NeighborhoodRule().bind(model)
    model.codebook = codes(5)
    with pytest.raises(ValueError, match="each of the 4 tokens, got 5"):
        NeighborhoodRule().bind(model)
    model.codebook = torch.full((4, 2), torch.nan)
    with pytest.raises(ValueError, match="finite"):
        NeighborhoodRule().bind(model)
    with pytest.raises(ValueError, match="bind"):
        NeighborhoodRule().neighbor_prob(torch.ones(1, 1, 4) / 4, torch.zeros(1, 1, dtype=torch.int64))


def test_noise_is_not_touched_by_what_is_granted():
    """The same coins as the exact rule: who spent nothing was judged exactly."""
    p, q = random_probs(3000, 8, False).float().unbind(1)
    probs, drafted = p[:, None].expand(-1, 4, -1), q[:, None].expand(-1, 3, -1)
    noise = Noise(torch.arange(3000), torch.arange(4).expand(3000, -1), 7)
    tokens = noise.at(torch.zeros(3000).long()).sample(drafted[:, :1], Purpose.DRAFT).expand(-1, 3)
    draft = Draft(tokens, Tree.make_chain(3), drafted)
    strict = speculative_sampling(probs, draft, noise, torch.zeros(3000))
    for rule in RULES.values():
        relaxed = bound(rule, 8)(probs, draft, noise, torch.zeros(3000))
        free = relaxed.relaxation == 0
        assert free.any() and torch.equal(relaxed.count[free], strict.count[free]), rule
        assert (relaxed.count >= strict.count).all()

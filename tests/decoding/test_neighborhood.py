"""The neighborhood rule: its neighbor table, its greedy form, and the residuals of released code, which are found."""

import dataclasses
import math

import pytest
import torch
from one_step import one_step, random_probs
from table_methods import PRESETS_OF_TOKENS, RELAXED_RULES, bind_rule, codebook, table_model, total_variation

from vargen.decoding import (
    Accelerator,
    Draft,
    Engine,
    Jacobi,
    NeighborhoodRule,
    Noise,
    Sampling,
    Tree,
    decode,
)
from vargen.decoding.experimental import JacobiTree
from vargen.decoding.neighbors import build_neighbor_table
from vargen.decoding.noise import Purpose
from vargen.decoding.rules import acceptance_rule
from vargen.files import cache_folder
from vargen.kernels import dispatch
from vargen.verify.tables import TableModel

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


@pytest.mark.parametrize("is_cpu", [True, False], ids=["by group", "by tensors"])
@pytest.mark.parametrize("name", ["lantern", "gsd", "lantern-jacobi"])
def test_a_greedy_image_beside_a_sampled_one_is_the_image_alone(name, is_cpu, monkeypatch):
    """Also as on a GPU, where the options of the slots are tensors."""
    monkeypatch.setattr(dispatch, "EAGER_CPU", is_cpu)
    condition, seeds, spent = torch.tensor([0, 1]), torch.tensor([7, 8]), 0.0
    for options in ((GREEDY, Sampling()), (Sampling(0.9, 5, 0.95), GREEDY), (GREEDY, Sampling(0.0, top_k=2))):
        engine = Engine(table_model(), PRESETS_OF_TOKENS[name], batch_size=2)
        for row in range(2):
            engine.submit(condition[row, None], seeds[row, None], options[row])
        for image in engine.run():
            own = condition[image.number, None], seeds[image.number, None], PRESETS_OF_TOKENS[name], options[image.number]
            alone = decode(table_model(), *own)
            assert torch.equal(image.tokens, alone.tokens[0]) and image.stats.passes == alone.stats.passes
            assert math.isclose(image.stats.relaxation[0], alone.stats.relaxation[0], abs_tol=1e-4)
            spent += image.stats.relaxation[0] * own[3].is_greedy
    assert name == "gsd" or spent > 0


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


def test_codes_that_are_all_alike_have_the_same_neighbours_everywhere(own_cache):
    table = build_neighbor_table(torch.ones(50, 3), 4)
    assert table[0].tolist() == [1, 2, 3, 4] and table[2].tolist() == [0, 1, 3, 4] and table[49].tolist() == [0, 1, 2, 3]


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


def test_a_bound_neighbourhood_is_the_same_method():
    model = TableModel(vocab=12, tokens=4)
    model.codebook = codebook(12)
    rule = NeighborhoodRule(size=3)
    assert rule.bind(model) == rule and Accelerator(drafter=Jacobi(4), acceptance=rule).spec()


def test_a_bound_of_the_mass_is_none_of_the_distance():
    """LANTERN's delta limits each draft's own modification; the sum over drafts is what is reported, and is larger."""
    p, q = random_probs(64, 30, False).unbind(1)
    output, _ = one_step(bind_rule(NeighborhoodRule(size=29, ratio=None, delta=0.05), 30), p, q)
    assert total_variation(output, p).max() > 0.1


def with_residual(make):
    """The neighbourhood rule, refusing into `make(p, q, tokens, A, size nearest)`, where A is what counted for the draft."""
    rule = bind_rule(NeighborhoodRule(size=4, ratio=3.0), 9)

    @acceptance_rule(exact=False)
    def wrong(probs, draft, noise, relaxation):
        verdict = rule(probs, draft, noise, relaxation)
        p, near = probs[:, 0], rule.neighbor_table[draft.tokens[:, 0]].long()
        mass = p.gather(1, near).cumsum(1)
        counted = mass <= 2.0 * p.gather(1, draft.tokens)
        left = make(p, draft.probs[:, 0], draft.tokens, near, counted)
        return dataclasses.replace(verdict, next_token=noise.select_slot(None).sample(left[:, None], Purpose.RESIDUAL)[:, 0])

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
    output, probability = one_step(with_residual(wrong), p, q)
    extra = (q * probability).sum(1) - torch.minimum(p, q).sum(1)
    above = total_variation(output, p) - extra
    assert above.min() > -1e-9  # no residual costs less than the optimal one
    assert above.max() > 1e-2

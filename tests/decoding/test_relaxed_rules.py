"""Relaxed rules: what one step costs is exactly the acceptance that they grant, report and cap; wrong residuals cost
more."""

import dataclasses
import math

import pytest
import torch
from table_methods import RELAXED_RULES, TREE_RULES, TopKTree, bind_rule, codebook, random_probs

from vargen.decoding import (
    Accelerator,
    Draft,
    DynamicTree,
    GroupedRule,
    Jacobi,
    NeighborhoodRule,
    Noise,
    PooledRule,
    Purpose,
    Sampling,
    Speculative,
    Tree,
    decode,
    speculative_sampling,
)
from vargen.decoding.experimental import (
    JacobiTree,
    MixtureRule,
    SampledTree,
    SpeculativeTree,
    TypicalRule,
    Wavefront,
    WavefrontRule,
)
from vargen.decoding.neighbors import build_neighbor_table
from vargen.decoding.tree_rules import DraftTokens
from vargen.files import cache_folder
from vargen.kernels import ops
from vargen.verify.exact_sum import sum_pass
from vargen.verify.exactness import DETECTED, TOLERANCE, Case
from vargen.verify.tables import TableLowRes, TableModel

# -- one step, summed exactly -----------------------------------------------------------------------------------------

ONE_LEFT = Case("one token left", 2, vocab=5, sampling=Sampling(top_p=0.97))


@pytest.mark.parametrize("rule", RELAXED_RULES.values(), ids=RELAXED_RULES)
@pytest.mark.parametrize(
    "drafter",
    [Jacobi(2), Speculative(1), SpeculativeTree(DynamicTree(1, 1, 1)), TopKTree(DynamicTree(1, 1, 1))],
    ids=["jacobi", "small model", "tree", "tree without q"],
)
def test_one_step_is_as_far_from_the_target_as_it_reports(drafter, rule):
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


# -- uniforms ----------------------------------------------------------------------------------------------------------


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


# -- groups ------------------------------------------------------------------------------------------------------------


def window_of_laws(images: int, vocab: int, drafts: int, seed: int = 0) -> tuple[torch.Tensor, Draft, Noise]:
    """Random target probabilities and drafts from others, some of them filtered to a few tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, images, drafts + 1, vocab, generator=generator) ** 4
    weights[:, ::3] *= weights[:, ::3] > weights[:, ::3].median(-1, keepdim=True).values
    probs, drafted = weights / weights.sum(-1, keepdim=True)
    drafted = drafted[:, 1:]
    seeds, position = torch.arange(images), torch.arange(drafts + 1).expand(images, -1)
    tokens = Noise(seeds + 999, position[:, 1:]).sample(drafted, Purpose.TOKEN)
    return probs, Draft(tokens, Tree.make_chain(drafts), drafted), Noise(seeds, position, 7)


def plain_group(p: list[float], token: int, size: int, delta: float) -> set[int]:
    """The published group by sorting: the nearest ranks, half above and half below, filtered."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i != token, i))
    rank = order.index(token)
    near = order[max(0, rank - size // 2) : rank] + order[rank + 1 : rank + 1 + (size + 1) // 2]
    return {i for i in near if p[i] > 0 and abs(p[i] - p[token]) < delta}


@pytest.mark.parametrize("size", [1, 2, 3, 6, 40])
@pytest.mark.parametrize("delta", [0.05, 0.3, 1.0])
def test_groups_equal_a_plain_walk_over_ranks(size, delta):
    probs, draft, _ = window_of_laws(20, 12, 4)
    rule = GroupedRule(size=size, delta=delta)
    member = rule.group_members(probs[:, :-1], draft.tokens)
    for image in range(20):
        for slot in range(4):
            token = int(draft.tokens[image, slot])
            found = set(member[image, slot].tolist()) - {token}
            assert found == plain_group(probs[image, slot].tolist(), token, size, delta)


@pytest.mark.parametrize("delta", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("sampled", [True, False])
def test_a_draft_is_accepted_by_the_ratio_of_the_sums_over_its_group(delta, sampled):
    """Each member counts once, and those that the filters exclude do not count."""
    probs, draft, _ = window_of_laws(20, 12, 4)
    rule = GroupedRule(size=6, delta=delta)
    found = rule.accept_prob(probs[:, :-1], draft.probs if sampled else None, draft.tokens)
    for image in range(20):
        for slot in range(4):
            token, p = int(draft.tokens[image, slot]), probs[image, slot].tolist()
            group = [token, *plain_group(p, token, 6, delta)]
            q = sum(draft.probs[image, slot, group].tolist()) if sampled else 1.0
            assert float(found[image, slot]) == pytest.approx(sum(p[member] for member in group) / q, rel=1e-5)


def test_the_distance_filter_leaves_out_codes_that_look_different():
    probs, draft, _ = window_of_laws(10, 12, 4)
    codes = torch.nn.functional.normalize(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), dim=-1)
    model = TableModel(vocab=12, tokens=4)
    model.codebook = codes
    rule = GroupedRule(size=12, delta=1.0, distance=0.8).bind(model)
    assert rule == GroupedRule(size=12, delta=1.0, distance=0.8)  # a bound rule is still the same method
    member = rule.group_members(probs[:, :-1], draft.tokens)
    gap = (codes[member] - codes[draft.tokens][..., None, :]).square().sum(-1)
    assert (gap < 0.8).all()
    loose = GroupedRule(size=12, delta=1.0).group_members(probs[:, :-1], draft.tokens)
    assert (member != draft.tokens[..., None]).sum() < (loose != draft.tokens[..., None]).sum()


# -- neighborhoods -----------------------------------------------------------------------------------------------------


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


# -- mixtures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_a_mixture_accepts_and_spends_in_proportion_to_the_distance_of_the_draft(weight):
    p, q = random_probs(40, 9, False).unbind(1)
    tokens = torch.arange(9).expand(40, -1)
    rows = [each[:, None].expand(-1, 9, -1) for each in (p, q)]
    drafted = DraftTokens(*rows, tokens, torch.ones(9))
    distance = (p - q).clamp(min=0).sum(1)
    rule = MixtureRule(weight)
    accepted = rule.accept_prob(*rows, tokens).clamp(max=1)
    assert torch.allclose((q * accepted).sum(1), 1 - weight * distance)
    assert torch.allclose((q * rule.relaxation(drafted)).sum(1), (1 - weight) * distance)
    committed = q * accepted + (q * (1 - accepted)).sum(1, keepdim=True) * (p - q).clamp(min=0) / distance[:, None]
    assert torch.allclose(committed, weight * p + (1 - weight) * q)


def test_a_mixture_never_accepts_what_the_filters_exclude():
    p, q = random_probs(40, 9, True).unbind(1)
    tokens = torch.arange(9).expand(40, -1)
    found = MixtureRule(0.2).accept_prob(p[:, None].expand(-1, 9, -1), q[:, None].expand(-1, 9, -1), tokens)
    assert torch.equal(found > 0, p > 0) and (p == 0).any()


# -- local repair ------------------------------------------------------------------------------------------------------


GRID = Case("three rows of two", tokens=6, rows=3)
SUMMED = Case("three rows of two, 2 codes", tokens=6, rows=3, vocab=2)


def drafts(window: int = 4, coupling: str = "maximal", initial: str = "low-res") -> Jacobi:
    return Jacobi(window, coupling, initial)


@pytest.mark.parametrize("coupling", ["maximal", "from-verdict"])
def test_initial_drafts_are_made_where_they_are_used(coupling, monkeypatch):
    """The host skips those of which it knows that no image takes them; the drafts are the same."""
    method = Accelerator(
        drafter=drafts(16, coupling), acceptance=speculative_sampling if coupling == "maximal" else PooledRule(0, 0.3)
    )
    asked = []

    def run():
        asked.clear()
        model = large()
        model.codebook = torch.randn(9, 4, generator=torch.Generator().manual_seed(5))
        probs = model.low_res.probs
        model.low_res.probs = lambda *given: asked.append(given[3].shape[1]) or probs(*given)
        return decode(model, torch.zeros(3, dtype=torch.int64), torch.arange(3), method).tokens

    few, made = run(), sum(asked)
    monkeypatch.setattr(ops, "host_values", lambda values: None)
    assert torch.equal(few, run()) and made < sum(asked) / 2


@pytest.mark.parametrize("radius", [0, 1])
@pytest.mark.parametrize("threshold", [0.3, 0.6])
def test_what_is_kept_past_a_rejection_is_reported_too(radius, threshold):
    method = Accelerator(drafter=drafts(6, "from-verdict"), acceptance=PooledRule(1, threshold, radius))
    found = sum_pass(method, SUMMED.model(), passes=2)
    assert DETECTED <= found.distance <= found.relaxation + TOLERANCE


def test_nothing_allowed_is_a_maximal_coupling():
    rule = PooledRule(size=0, threshold=2.0)
    verified = Accelerator(drafter=drafts(6, "from-verdict"), acceptance=rule)
    arguments = (torch.zeros(64, dtype=torch.int64), torch.arange(64))
    plain = decode(GRID.model(), *arguments, Accelerator(drafter=drafts(6), acceptance=speculative_sampling))
    found = decode(GRID.model(), *arguments, verified)
    assert torch.equal(plain.tokens, found.tokens) and not any(found.stats.relaxation)


# -- wavefronts -------------------------------------------------------------------------------------------------------


def front(reach: int, window: int = 6, budget: float | None = None, initial: str = "uniform") -> Accelerator:
    return Accelerator(drafter=Wavefront(window, initial=initial, reach=reach), acceptance=WavefrontRule(budget=budget))


def large() -> TableModel:
    model = TableModel(vocab=9, tokens=64, seed=6, rows=8)
    model.low_res = TableLowRes(TableModel(vocab=9, tokens=64, seed=8, rows=8))
    return model


def test_a_wavefront_is_no_further_from_the_target_than_was_reported():
    found = sum_pass(front(0), SUMMED.model(), passes=3)
    assert DETECTED <= found.distance <= found.relaxation + TOLERANCE


def test_a_front_of_a_whole_row_is_the_exact_window():
    arguments = (torch.zeros(8, dtype=torch.int64), torch.arange(8))
    plain = Accelerator(drafter=Jacobi(32, "maximal"), acceptance=speculative_sampling)
    assert torch.equal(decode(large(), *arguments, front(8, 32)).tokens, decode(large(), *arguments, plain).tokens)

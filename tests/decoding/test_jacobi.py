"""Jacobi windows: recorded probabilities are those drawn from, rows stand alone, and bad windows are refused."""

import pytest
import torch
from initial_drafts import MixtureJacobi

from vargen.decoding import (
    Accelerator,
    Drafter,
    Jacobi,
    Noise,
    Sampling,
    Speculative,
    Tree,
    decode,
    list_methods,
    shared_noise,
    speculative_sampling,
)
from vargen.decoding.costs import measure_pass_costs
from vargen.decoding.experimental import Lookup, Recycle, Wavefront
from vargen.decoding.relaxed_rules import PooledRule
from vargen.decoding.token_pass import TokenPass
from vargen.decoding.window import (
    WidthController,
)
from vargen.kernels.host import Clock
from vargen.verify.tables import TableLowRes, TableModel


@pytest.mark.parametrize("width", [2, 7, 24])
@pytest.mark.parametrize("coupling", ["independent", "maximal", "gumbel"])
def test_same_noise_samples_the_sequential_image_at_any_window(width, coupling):
    model = TableModel(vocab=5, tokens=24, seed=3, rows=4)
    model.low_res = TableLowRes(TableModel(vocab=5, tokens=24, seed=8, rows=4))
    condition, seeds = torch.zeros(6, dtype=torch.int64), torch.arange(6)
    plain = decode(model, condition, seeds, "ar")
    windows = (Jacobi(width, coupling), Jacobi(width, coupling, "low-res"), MixtureJacobi(width, coupling))
    for drafter in windows:
        fast = decode(model, condition, seeds, Accelerator(drafter=drafter, acceptance=shared_noise))
        assert torch.equal(plain.tokens, fast.tokens)


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("kind", [Jacobi, MixtureJacobi])
def test_initial_drafts_are_sampled_with_the_probabilities_they_record(kind, passes):
    """Per position, the share of each token over many images against what is recorded; images differ in seeds alone."""
    images, model = 20_000, TableModel(vocab=6, tokens=12, rows=4)
    method = Accelerator(drafter=kind(5, "maximal"), acceptance=speculative_sampling)
    token_pass = TokenPass(model, *method.bind(model, images), images, Clock(model.device, False))
    condition = torch.zeros(images, dtype=torch.int64)
    token_pass.allocate(condition)
    state = token_pass.state
    token_pass.start(list(range(images)), condition, torch.arange(images), Sampling())
    state.tokens[:, 0] = 4
    for _ in range(passes):  # leaves the same draft tokens and probabilities in all images
        token_pass.run(5)
        for held in (
            state.tokens,
            state.length,
            token_pass.drafter.drafted,
            token_pass.drafter.drafted_end,
            token_pass.drafter.probs,
        ):
            held.copy_(held[:1].expand_as(held))
    position = token_pass.drafter.drafted_end[:, None] + torch.arange(3)
    noise = Noise(torch.arange(images), position, 9)
    generated, probs = token_pass.drafter.draft_new(state, noise)
    probs = probs.expand(images, 3, 6)
    assert torch.allclose(probs.sum(-1), torch.ones(images, 3), atol=1e-6) and (probs[:1] == probs).all()
    share = torch.nn.functional.one_hot(generated, 6).double().mean(0)
    assert ((share - probs[0]).abs() <= 5 * (probs[0] * (1 - probs[0]) / images).sqrt() + 1e-9).all()


def test_the_controller_takes_the_cheapest_token():
    length, active = torch.zeros(2, dtype=torch.int64), torch.tensor([True, False])

    def choice(seconds, warmup_passes=0):
        return WidthController(seconds, warmup_passes)

    assert choice({1: 1.0, 4: 1.0, 16: 1.0}).choose() == 16  # steps cost the same: the widest
    dear = choice({1: 1.0, 4: 4.0, 16: 16.0})
    assert dear.choose() == 1  # as much for each token as one alone: no drafts
    dear.seconds_by_width = {1: 1.0, 4: 1.0, 16: 1.0}
    assert dear.choose() == 1  # and none from then on
    learning = choice({1: 1.0, 4: 1.1, 16: 8.0})
    assert learning.choose() == 4
    for _ in range(80):
        learning.observe(torch.tensor([1, 4]), active)  # the second image is finished and has no say
    assert learning.rate < 0.01 and learning.choose() == 1
    probing = choice({1: 1.0, 4: 1.5, 16: 16.0}, warmup_passes=2)  # worth a try, and not worth it as drafts are accepted
    assert [probing.choose() for _ in range(3)] == [4, 4, 1]
    model = TableModel(vocab=4, tokens=16)
    found = Jacobi("auto").bind(model, 2).choose_widths(model, length, 2)
    assert set(found.seconds_by_width) == {1, 2, 3, 4, 6, 8, 12, 16}


def test_the_controller_waits_for_the_slowest_image():
    """A batch of which one picture never takes a draft lasts as long as without drafts, whatever the others take."""
    active = torch.ones(4, dtype=torch.bool)
    for counts, fed in (([5, 5, 5, 5], 8), ([1, 6, 6, 7], 1)):
        choice = WidthController({1: 1.0, 8: 2.0}, warmup_passes=0)
        choice.width = 8
        for _ in range(80):
            choice.observe(torch.tensor(counts), active)
        assert choice.rate > 0.8 and choice.choose() == fed
    choice.width = 8
    choice.observe(torch.tensor([1, 6, 6, 7]), torch.tensor([False, True, True, True]))  # and for none that is finished
    assert choice.choose() == 8


@pytest.mark.parametrize(("price", "fed"), [(1.0, {1}), (0.4, {1, 4})])
def test_the_automatic_window_does_not_probe_where_nothing_could_pay(price, fed, monkeypatch):
    monkeypatch.setattr("vargen.decoding.jacobi.measure_pass_costs", lambda *_: {1: 1.0, 4: 4 * price})
    model = TableModel(vocab=4, tokens=60, spread=30.0)
    result = decode(model, torch.zeros(2, dtype=torch.int64), torch.arange(2), Accelerator(drafter=Jacobi("auto", "gumbel")))
    assert set(result.stats.passes_by_width) == fed


@pytest.mark.parametrize("costs", [{1: 1.0, 4: 4.0}, {1: 1.0, 4: 1.0}, {2: 1.0, 3: 1.1}])
def test_the_automatic_window_changes_no_image_of_same_noise(costs, monkeypatch):
    monkeypatch.setattr("vargen.decoding.jacobi.measure_pass_costs", lambda *_: costs)
    model, condition, seeds = TableModel(vocab=4, tokens=60), torch.zeros(2, dtype=torch.int64), torch.arange(2)
    plain = decode(model, condition, seeds)
    fast = decode(model, condition, seeds, Accelerator(drafter=Jacobi("auto", "gumbel")))
    assert torch.equal(fast.tokens, plain.tokens)
    assert set(fast.stats.passes_by_width) <= set(costs)


def test_the_cost_curve_is_measured_once_per_network_and_batch():
    model = TableModel(vocab=4, tokens=60)
    condition = torch.zeros(2, dtype=torch.int64)
    costs = measure_pass_costs(model, condition, 2, [2, 8])
    assert set(costs) == {2, 8} and all(seconds > 0 for seconds in costs.values())
    fed = len(model.passes)
    assert measure_pass_costs(model, condition, 2, [2, 8]) == costs and len(model.passes) == fed
    measure_pass_costs(model, condition[:1], 1, [2])
    assert len(model.passes) > fed


def test_a_rule_for_chains_refuses_trees():
    class Trees(Drafter):
        topology = "tree"

    with pytest.raises(ValueError, match="verifies a chain"):
        Accelerator(drafter=Trees(), acceptance=speculative_sampling)
    assert Accelerator(drafter=Trees(), acceptance=shared_noise).drafter.topology == "tree"


@pytest.mark.parametrize(
    ("drafter", "longest"),
    [
        (Jacobi(99), Jacobi(12)),
        (Jacobi(99, "maximal", "low-res"), Jacobi(12, "maximal", "low-res")),
        (Wavefront(99), Wavefront(12)),
        (Speculative(99), Speculative(11)),
        (Lookup(99), Lookup(11)),
        (Recycle(99), Recycle(11)),
    ],
    ids=lambda drafter: type(drafter).__name__,
)
def test_drafts_are_limited_to_the_grid(drafter, longest):
    model = TableModel(vocab=4, tokens=12, rows=3)
    model.draft_model, model.low_res = TableModel(4, 12, seed=5, rows=3), TableLowRes(TableModel(4, 12, rows=3))
    assert drafter.bind(model, 2).width == longest.width == 12
    condition, seeds = torch.zeros(2, dtype=torch.int64), torch.arange(2)
    rule = PooledRule(0, 0.5) if isinstance(drafter, Wavefront) else speculative_sampling
    found, expected = (
        decode(model, condition, seeds, Accelerator(drafter=each, acceptance=rule)) for each in (drafter, longest)
    )
    assert torch.equal(found.tokens, expected.tokens) and found.stats.passes == expected.stats.passes


def test_a_draft_model_must_exist_and_share_the_vocabulary():
    model = TableModel(vocab=4, tokens=9)
    arguments = (model, torch.zeros(1, dtype=torch.int64), torch.arange(1))
    with pytest.raises(ValueError, match="needs a draft model"):
        decode(*arguments, "speculative")
    for small in (TableModel(vocab=5, tokens=9), TableModel(vocab=4, tokens=10)):
        with pytest.raises(ValueError, match="share the target's vocabulary"):
            decode(*arguments, Accelerator(drafter=Speculative(2, small), acceptance=speculative_sampling))
    model.draft_model = TableModel(vocab=4, tokens=9, seed=3)
    assert decode(*arguments, "speculative").finished


def test_presets_say_what_they_are():
    relaxed = [preset.name for preset in list_methods("next-token") if preset.kind == "relaxed"]
    assert relaxed == ["gsd", "mulo", "lantern", "lantern-jacobi", "wavefront"]
    for preset in list_methods("next-token"):
        assert preset.summary and preset.source
        assert preset.drafter.topology in ("chain", "tree")
    assert Tree.make_chain(3).is_chain

"""Jacobi windows: recorded probabilities are those drawn from, rows stand alone, and bad windows are refused."""

import pytest
import torch

from vargen.decoding import Accelerator, Jacobi, decode
from vargen.decoding.window import WidthController
from vargen.verify.tables import TableModel


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

"""Drafts from a low resolution, pooled acceptance, local repair: exact where they say so, else as far from it as reported."""

import pytest
import torch

from vargen.decoding import Accelerator, Jacobi, PooledRule, decode, speculative_sampling
from vargen.decoding.experimental import Wavefront, WavefrontRule
from vargen.evaluation.exact_sum import sum_pass
from vargen.evaluation.exactness import DETECTED, TOLERANCE, Case
from vargen.evaluation.table_models import TableLowRes, TableModel
from vargen.kernels import ops

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
def test_images_are_no_further_from_the_target_than_was_reported(radius, threshold):
    """What the rule keeps past the first refusal is counted, too."""
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
